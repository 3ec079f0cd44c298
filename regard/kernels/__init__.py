"""Kernels: plain functions of tensors that the mechanisms are made of."""
