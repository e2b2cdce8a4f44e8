"""LoRA: low-rank adapters on a frozen base model (Hu et al., "LoRA", 2021), in the layers of the
package peft.
"""
