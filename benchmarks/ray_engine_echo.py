"""The other side of `benchmarks.ray_engine`'s bare TCP connection, on the second host."""

from benchmarks.ray_engine import echo

if __name__ == "__main__":
    echo()
