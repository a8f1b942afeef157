"""Start actors, wire channels, hand out plans. ``protocol`` is the seam: ``inline`` is one thread, ``local`` processes."""
