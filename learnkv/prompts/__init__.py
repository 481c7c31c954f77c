"""Prompts: generators of our own, the user's own files, and their tokens for a model at hand."""

from learnkv.prompts.make import drafts, load_prompts, make
from learnkv.prompts.prompt import Encoded, Prompt, Question, encode

__all__ = ["Encoded", "Prompt", "Question", "drafts", "encode", "load_prompts", "make"]
