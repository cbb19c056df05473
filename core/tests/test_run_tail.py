"""Following a file that grows."""

from prime_rl.run.tail import Tail


def test_whole_lines_come_once_and_a_part_waits_for_its_end(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.new_lines() == []  # no file yet
    with path.open("a") as file:
        file.write("one\n\ntw")
        file.flush()
        assert tail.new_lines() == [b"one"]
        assert tail.new_lines() == []
        file.write("o\nthree\n")
        file.flush()
        assert tail.new_lines() == [b"two", b"three"]
