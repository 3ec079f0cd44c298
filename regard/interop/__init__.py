"""Import and export: Hugging Face folders, llama2.c files, CTranslate2, and our attention inside Hugging Face models.

Read families/base.py first, then huggingface.py.
"""
