"""Decoding, written once over `start` and `extend`: greedy, beam search, sampling.

Read base.py first, then greedy.py (one token per row) and beam.py.
"""

from regard.decoding.base import DecodingConfig, Hypothesis
from regard.decoding.ensemble import Ensemble
from regard.decoding.searching import caption, decode, generate, search
from regard.decoding.sliding import Sliding

__all__ = ["DecodingConfig", "Ensemble", "Hypothesis", "Sliding", "caption", "decode", "generate", "search"]
