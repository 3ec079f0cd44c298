"""Import and export: Hugging Face, timm, llama2.c, CTranslate2, and our attention inside Hugging Face models.

Read families/base.py first, then huggingface.py.
"""
