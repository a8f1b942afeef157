"""Collectives between actors. `opening.open_group` makes a party's part of a group, and `end.GroupCollective` its ends.

`terms` has the rules as pure functions; parties find each other in a `rendezvous` and then publish offers in a `table`; the
`group` decides when tensors move, and one of the `movers` moves them. `local` has all parties in one thread.
"""
