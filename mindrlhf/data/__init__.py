"""Prompt data: tasks, tokenizer, prompt templates, MindRecord files, the prompt stream."""
