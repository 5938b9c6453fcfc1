"""Measurements of this machine; a package, as PyArrow 17 installs one of this name and a plain folder yields to it."""
