"""Lightning, Accelerate and the Hugging Face Trainer with a prepared step behind their own calls.

Each framework is imported by its own module: `mezzo.integrations.lightning`, `.accelerate`, `.transformers`.
"""
