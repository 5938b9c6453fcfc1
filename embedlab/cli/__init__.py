"""The command line: the only part that knows Hydra, OmegaConf and argument parsing."""
