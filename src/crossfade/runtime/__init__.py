"""Obey plans inside one actor: a plan's actions become a flat list of bound calls, and a cursor runs them."""
