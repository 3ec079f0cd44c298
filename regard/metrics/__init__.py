"""How good an output is: translations against references, word links against gold links."""
