"""Linear layers split over the ranks, and a model made of them."""
