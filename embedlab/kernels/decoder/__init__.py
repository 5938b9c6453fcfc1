"""The blocks of a decoder with LoRA, written out."""
