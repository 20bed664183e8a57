"""Four ranks that share weights, sequences or both: one of them dies, or they become fewer."""

import os
import signal
import time

from elastic import TORCHRUN, rank_pids, wait_for_launcher, wait_for_step
from harness import assert_same, assert_whole, attempt, fingerprint, read_log

from nanolong.run.folder import list_steps

# of four processes
LAYOUTS = {
    "fsdp": ("--parallel=fsdp",),
    "sp": ("--sequence_parallel=4",),
    "fsdp and sp": ("--parallel=fsdp", "--sequence_parallel=2"),
}
# every other setting is that of all layouts: four heads and four micro-batches divide in each
SHAPE = ("--n_head=4", "--gradient_accumulation_steps=4", "--pos=t5")
# processes, and their layout: a run goes on from one to the next
CHANGES = ((4, LAYOUTS["fsdp"]), (2, LAYOUTS["fsdp"]), (1, ()), (4, LAYOUTS["fsdp and sp"]))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NANOLONG_TIMEOUT": "60"}


def trials(harness):
    """Yield (description, what went wrong or None) for each trial."""
    sharded = Sharded(harness)
    yield from sharded.killed_ranks()
    yield from sharded.changing_layouts()


class Sharded:
    """The trials, and the undisturbed runs that they are compared with."""

    def __init__(self, harness):
        self.harness = harness
        self.length = ["--max_iters=48", "--eval_interval=6"]
        self.straight = {}  # layout -> the fingerprint of an undisturbed run

    def train(self, run, processes, layout, *flags, max_restarts=0):
        """Start a training. Returns the launcher and the file of its output."""
        words = self.harness.train_command(run, *SHAPE, *self.length, *layout, *flags)
        if processes == 1:
            return self.harness.launch(words, env=ENVIRONMENT)
        torchrun = ["--standalone", f"--nproc_per_node={processes}"]
        if max_restarts:
            torchrun += TORCHRUN
        return self.harness.launch(words, *torchrun, env=ENVIRONMENT)

    # kill -9 of a rank

    def killed_ranks(self):
        for i in range(self.harness.cfg.shard_kills):
            layout = list(LAYOUTS)[i % len(LAYOUTS)]
            yield attempt(
                f"kill -9 of one rank of four, {layout}: torchrun restarts, bit-exact",
                self.kill_rank,
                layout,
            )

    def kill_rank(self, layout):
        if layout not in self.straight:
            run = self.harness.new_path("straight")
            wait_for_launcher(*self.train(run, 4, LAYOUTS[layout]))
            self.straight[layout] = fingerprint(run)
        killed = False
        while not killed:  # the run may end before a rank can be killed
            run = self.harness.new_path("killed")
            process, output_file = self.train(run, 4, LAYOUTS[layout], max_restarts=3)
            wait_for_step(run, None, process, output_file, n_ranks=4)
            time.sleep(self.harness.rng.uniform(0, 2))
            ranks = rank_pids(process)
            if len(ranks) == 4:
                os.kill(self.harness.rng.choice(ranks), signal.SIGKILL)
                killed = True
            wait_for_launcher(process, output_file)
        assert_same(run, self.straight[layout])

    # other numbers of processes, in other layouts

    def changing_layouts(self):
        yield from self.harness.repeat(
            "4 processes with fsdp, killed, 2 with fsdp, killed, 1, killed, 4 with fsdp and sp: "
            "losses within 1e-5 of one process",
            self.change_layouts,
            5,
        )

    def change_layouts(self, run):
        expected = self.harness.new_path("one")
        wait_for_launcher(*self.train(expected, 1, ()))
        for processes, layout in CHANGES:
            # what is not given stays as it was in the run that is resumed
            flags = [] if "--parallel=fsdp" in layout else ["--parallel=ddp"]
            if not any("sequence_parallel" in flag for flag in layout):
                flags.append("--sequence_parallel=1")
            process, output_file = self.train(run, processes, layout, *flags)
            if (processes, layout) != CHANGES[-1]:
                self.kill_at_next_step(run, process, output_file, processes)
                assert_whole(run)
        wait_for_launcher(process, output_file)
        losses = {row["step"]: row["loss"] for row in read_log(run) if "loss" in row}
        rows = [row for row in read_log(expected) if "loss" in row]
        assert len(rows) == len(losses) == 48, (len(rows), len(losses))
        for row in rows:
            assert abs(losses[row["step"]] - row["loss"]) < 1e-5, row

    def kill_at_next_step(self, run, process, output_file, processes):
        """kill -9 of a random rank once there is a new checkpoint; the others lose it and end."""
        steps = list_steps(run) if run.is_dir() else []
        last_step = steps[-1].name if steps else None
        if processes == 1:
            while list_steps(run)[-1].name == last_step:
                assert process.poll() is None, output_file.read_text()[-2000:]
                time.sleep(0.01)
            process.kill()
        else:
            wait_for_step(run, last_step, process, output_file, n_ranks=processes)
            ranks = rank_pids(process)
            if ranks:
                os.kill(self.harness.rng.choice(ranks), signal.SIGKILL)
        process.wait(120)
