"""To and from what others publish: Hugging Face folders, llama2.c files, CTranslate2, and our attention inside their
models. Read families.py, then huggingface.py."""
