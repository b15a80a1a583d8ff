"""Reward models and judges, each with its own tokenizer and chat template.

A reward model is a sequence classifier with one label; a judge is a language model that answers yes or no. Both are
whole on the rank of a replica that scores, and are neither trained nor saved.
"""
