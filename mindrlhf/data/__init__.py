"""Prompt data: tasks, tokenizer, prompt templates, MindRecord files, the prompt stream.

This room knows nothing of models.
"""
