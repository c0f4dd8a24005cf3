"""WHAT runs: real models, adapters, optimizers, one training step in phases; the same code under every instrument."""
