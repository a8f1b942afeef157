"""Move one value along one edge. ``protocol`` is the seam, every other file a transport."""
