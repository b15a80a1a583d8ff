"""Prompt data: tasks, tokenizer, prompt templates, MindRecord files, the prompt stream.

This room knows of models the text settings of their families alone.
"""
