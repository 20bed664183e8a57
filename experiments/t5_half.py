"""T5 whose last bucket starts at half of the training length: an arm of leaderboard.py."""

from model import POSITIONS


class HalfT5(POSITIONS["t5"]):
    lengths = 2
