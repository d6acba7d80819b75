"""Runs commands within a deadline: each in a process group of its own, which is killed as a whole, and with its output in
files, so that nothing that a command leaves behind can hold up who waits for it."""

import math
import os
import signal
import subprocess
import tempfile
import threading
import time

# Seconds that are kept for the table and the archive, and with fewer than which a command is not started; of a short
# deadline, less.
RESERVE, LEAST = 6.0, 3.0


class Failed(Exception):
    """A command without a result; `done` is what it said, if it ended."""

    def __init__(self, why, done=None):
        super().__init__(why)
        self.done = done


class Cut(Failed):
    """A command that the deadline ended or left no time for; it is run again by the next call."""


class Done:
    """What a command that ended said."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def last_line(self):
        lines = [line for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()[:400]


class Runner:
    def __init__(self, seconds, log):
        """Everything ends `seconds` from now; commands that fail are written to the file `log`."""
        seconds = seconds or math.inf
        self.end = time.monotonic() + seconds
        self.reserve, self.least = min(RESERVE, seconds / 8), min(LEAST, seconds / 16)
        self.log, self.lock, self.running = log, threading.Lock(), set()

    def left(self):
        return self.end - time.monotonic() - self.reserve

    def start(self, arguments, environment=(), **streams):
        environment = {**os.environ, **{k: str(v) for k, v in dict(environment).items()}}
        with self.lock:
            process = subprocess.Popen([str(x) for x in arguments], env=environment, start_new_session=True, **streams)
            self.running.add(process)
        return process

    def kill(self, process):
        """Ends a process and what it started, if they have not ended."""
        with self.lock:
            self.running.discard(process)
        # The group exists as long as any of its processes does.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass  # It is stuck in the driver, and cannot be helped.

    def kill_all(self):
        for process in list(self.running):
            self.kill(process)

    def limit(self, most):
        """Seconds that a command may take, and whether it is the deadline that says so."""
        left = self.left()
        if left < self.least:
            raise Cut("not run: no time left")
        return min(most, left), left < most

    def run(self, arguments, most=300, **environment):
        """Runs a command for at most so many seconds; its output, or why there is none."""
        limit, by_deadline = self.limit(most)
        with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
            process = self.start(arguments, environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            self.kill(process)

            def text(file):
                file.seek(0)
                return file.read().decode(errors="replace")

            done = Done(code, text(out), text(err))
        if code == 0:
            return done.out
        self.note(arguments, environment, done)
        if code is None:
            why = f"no end after {limit:.0f} s"
            raise Cut(why + ", at the deadline", done) if by_deadline else Failed(why, done)
        raise Failed(f"exit code {code}: {done.last_line()}", done)

    def note(self, arguments, environment, done):
        """The command that failed and the end of what it said."""
        variables = " ".join(f"{k}={v}" for k, v in environment.items())
        said = "\n".join((done.out[-1500:] + "\n" + done.err[-3000:]).splitlines())
        with self.lock, open(self.log, "a") as file:
            file.write(f"\n$ {variables} {' '.join(map(str, arguments))}\nexit code {done.code}\n{said}\n")
