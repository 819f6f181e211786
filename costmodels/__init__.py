"""Devices, links, and the time and memory of operators and collectives: pure functions, SI units."""
