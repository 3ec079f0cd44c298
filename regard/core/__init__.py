"""What every layer and model speaks and what knows nothing of them. It imports `regard.kernels`, and no other package
of ours."""
