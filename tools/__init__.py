"""What maintainers run; a package, since a plain folder yields to an installed package of this name."""
