# SPDX-License-Identifier: MIT
"""Training runs that are stopped at random moments: killed, signalled, or left without a place for their output."""

import fcntl
import os
import pty
import signal
import termios
import time

from processes_runs import SETTINGS, has_temporary, read_lines, wait_until

# ---- Kills ----

# Of a run that saves after every step, about half of the time is saving, so that any moment is often in a save.
MOMENTS = ('any', 'any', 'any', 'start', 'save', 'link')


def wait_for_moment(rng, moment, process, out, seconds):
    """Returns at a random moment of that kind, or when the process has ended."""
    if moment == 'any':
        wait(rng.uniform(0, 0.6 * seconds), process)
    elif moment == 'start':
        wait(rng.uniform(0, 0.03), process)
    elif moment == 'save':  # files of a checkpoint are being written, renamed or removed
        wait_until(process, lambda: has_temporary(out))
        wait(rng.choice((0, rng.uniform(0, 0.002), rng.uniform(0, 0.02))), process)
    elif moment == 'link':  # older checkpoints are being removed
        before = target_of(out)
        wait_until(process, lambda: target_of(out) != before)


def wait(seconds, process):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.running():
        time.sleep(min(0.001, max(0.0, end - time.monotonic())))


def target_of(out):
    try:
        return os.readlink(out + '/latest')
    except OSError:
        return None


def killed_run(world, part, setting):
    rng = part.rng
    out = world.fresh_run(rng)
    options = {'save_every': rng.choice((1, 1, 1, 3)), 'keep': rng.choice((1, 2, 3))}
    _, seconds = world.reference(setting)
    for _ in range(rng.randint(1, 8)):
        moment = rng.choice(MOMENTS)
        process = world.start(world.train_arguments(setting, out, threads=rng.choice((1, 2, 3, 4)), **options))
        wait_for_moment(rng, moment, process, out, seconds)
        if not process.signal(signal.SIGKILL):
            process.expect(0)
            break
        process.finish()
        if process.status == 0:  # it ended just before the signal
            break
        part.count('kills')
        part.count('during a save', has_temporary(out))
        step = world.check_folder(setting, out)
        if step is not None and rng.random() < 0.2:
            world.start(['sample', out, '--bytes', '1']).expect(0)
    world.finish(setting, out, threads=rng.choice((1, 2, 4)), **options)
    part.count('runs resumed to the same bits')


def kills(world, part):
    part.count('kills', 0), part.count('during a save', 0)
    for setting in part.rounds(SETTINGS):
        part.attempt(setting.name, killed_run, world, part, setting)


# ---- Signals ----

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Runs of one setting in one folder; each method stops or holds them up differently, and checks what was saved."""

    def __init__(self, world, part, setting):
        self.world, self.part, self.rng, self.setting = world, part, part.rng, setting
        self.out = world.fresh_run(self.rng)
        self.seconds = world.reference(setting)[1]
        # rarely saves on its own, so that a stop that does not save is noticed
        self.options = {'save_every': self.rng.choice((0, 1, 5)), 'keep': 2, 'threads': self.rng.choice((1, 2, 4))}

    def start(self, *more, **how):
        return self.world.start(self.world.train_arguments(self.setting, self.out, **self.options) + list(more), **how)

    def wait_for_step(self, process):
        """A random moment after the first line of output, by when signals are handled. False: it ended before."""
        begun = wait_until(process, lambda: os.path.getsize(process.out_path) > 0)
        wait(self.rng.choice((0, self.rng.uniform(0, 0.005), self.rng.uniform(0, self.seconds / 4))), process)
        return begun

    def check(self, process, status=0, pattern='(stopped|done) at step'):
        process.expect(status, pattern)
        if process.status >= 0:
            self.world.check_stopped(self.setting, self.out, process.out() + process.err())
        else:
            self.world.check_folder(self.setting, self.out)

    def one_signal(self):
        process = self.start()
        self.wait_for_step(process)
        process.signal(self.rng.choice(STOPPING))
        self.check(process)

    def early_signal(self):
        """Before the run has begun, a signal ends the process as usual."""
        number = self.rng.choice(STOPPING)
        process = self.start()
        wait(self.rng.uniform(0, 0.02), process)
        process.signal(number)
        self.check(process, (0, -number))

    def two_signals(self):
        """Several times in one run: only a few of the moments are in the update of the parameters."""
        for _ in range(self.rng.randint(1, 8)):
            process = self.start()
            self.wait_for_step(process)
            process.signal(self.rng.choice(STOPPING))
            wait(self.rng.choice((0, 0, self.rng.uniform(0, 0.001), self.rng.uniform(0, 0.01))), process)
            process.signal(self.rng.choice(STOPPING))
            self.check(process)
            self.part.count('stops')

    def many_signals(self):
        process = self.start()
        self.wait_for_step(process)
        for _ in range(self.rng.randint(3, 30)):
            process.signal(self.rng.choice(STOPPING))
            wait(self.rng.choice((0, self.rng.uniform(0, 0.001))), process)
        self.check(process)

    def stop_and_continue(self):
        """SIGSTOP and SIGCONT change nothing."""
        process = self.start()
        for _ in range(self.rng.randint(1, 5)):
            wait(self.rng.uniform(0, self.seconds / 3), process)
            process.signal(signal.SIGSTOP)
            wait(self.rng.uniform(0, 0.05), process)
            process.signal(signal.SIGCONT)
        self.check(process, pattern='done at step %d,' % self.setting.steps)

    def stopped_then_signalled(self):
        """A signal that arrives while the process is stopped is handled when it continues."""
        process = self.start()
        self.wait_for_step(process)
        process.signal(signal.SIGSTOP)
        process.signal(self.rng.choice(STOPPING))
        wait(self.rng.uniform(0, 0.02), process)
        process.signal(signal.SIGCONT)
        self.check(process)

    def hangup_ignored(self):
        """As under nohup: the run continues."""
        process = self.start(prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        wait(self.rng.uniform(0, self.seconds), process)
        process.signal(signal.SIGHUP)
        self.check(process, pattern='done at step %d,' % self.setting.steps)

    def closed_pipe(self):
        reader, writer = os.pipe()
        more = ['--json'] if self.rng.random() < 0.5 else []
        process = self.start(*more, stdout=writer)
        os.close(writer)
        bytes_left = self.rng.choice((0, 1, 100, 1000, 4000))
        while bytes_left > 0:
            text = os.read(reader, bytes_left)
            if not text:
                break
            bytes_left -= len(text)
        os.close(reader)
        self.output_failed(process, 'Broken pipe')

    def full_device(self):
        """From a random step on, the output has no place."""
        before = self.rng.randrange(self.setting.steps)
        self.start('--stop-at', str(before)).expect(0)
        more = ['--json'] if self.rng.random() < 0.5 else []
        with open('/dev/full', 'wb') as full:
            process = self.start(*more, stdout=full)
        self.output_failed(process, 'No space left on device')
        if process.status == 0:
            process.fail('nothing could be written, and the status is 0')
        if not before <= self.world.check_folder(self.setting, self.out) <= before + 1:
            process.fail('it did not stop at the first step')

    def output_failed(self, process, reason):
        sentence = 'standard output cannot be written: %s; the run is saved at step' % reason
        process.finish()
        if process.status == 0:  # it was done before
            self.world.check_done(self.setting, self.out)
        else:
            self.check(process, 1, sentence)

    def closed_terminal(self):
        """The terminal's end sends SIGHUP, and its output fails; whichever is seen first decides the status."""
        own, terminal = pty.openpty()

        def prepare():
            os.setsid()
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        process = self.start(prepare=prepare, stdout=terminal)
        os.close(terminal)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK)
        wait_until(process, lambda: len(read_lines(self.out + '/metrics.jsonl')[0]) > 0 or not drain(own))
        end = time.monotonic() + self.rng.uniform(0, self.seconds / 2)
        while time.monotonic() < end and process.running():
            drain(own)
            time.sleep(0.001)
        os.close(own)
        self.check(process, (0, 1, -signal.SIGHUP), '')
        if process.status == -signal.SIGHUP and read_lines(self.out + '/metrics.jsonl')[0]:
            process.fail('SIGHUP ended it after its first step')


def drain(file):
    """Reads what is there. False: the other end is closed."""
    try:
        return os.read(file, 65536) != b''
    except BlockingIOError:
        return True
    except OSError:
        return False


STOPS = ['one_signal', 'early_signal', 'two_signals', 'many_signals', 'stop_and_continue', 'stopped_then_signalled',
         'hangup_ignored', 'closed_pipe', 'closed_terminal']


def stopped_run(world, part, name):
    stop = Stop(world, part, part.rng.choice(SETTINGS))
    getattr(stop, name)()
    part.count('stops')
    world.finish(stop.setting, stop.out, **stop.options)
    part.count('runs resumed to the same bits')


def signals(world, part):
    names = list(STOPS)
    if os.path.exists('/dev/full'):
        names.append('full_device')
    else:
        part.note('skipped: output to a full device, because there is no /dev/full')
    for name in part.rounds(names):
        part.attempt(name, stopped_run, world, part, name)
