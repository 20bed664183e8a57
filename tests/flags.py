"""Commands of tests, which replace some flags of a common list: scripts take a flag only once."""


def last_of_each_flag(words):
    """Drop every --name=value that a later one replaces."""
    words = [str(word) for word in words]
    last = {word.partition("=")[0]: i for i, word in enumerate(words) if word.startswith("--")}
    return [word for i, word in enumerate(words) if last.get(word.partition("=")[0], i) == i]
