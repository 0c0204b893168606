"""Texts: tokenizers, tables of sentences, pairs, choices and tagged words."""
