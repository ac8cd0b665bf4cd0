# SPDX-License-Identifier: MIT
"""Processes without standard streams, and under limits of the system: a run either ends with the bytes of the
undisturbed one, or with a sentence and an undamaged checkpoint, from which it then resumes to those bytes.
"""

import errno
import filecmp
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import time

from processes_runs import NARROW, SETTINGS, SUMS, limit, write_safetensors
from processes_stops import wait


def resume_limited(world, part, setting, prepare, status=(0, 1), sentence='vjp train: .', threads=4):
    """
    Resumes a run under a limit. Where it does not finish: the sentence, and nothing that was saved is damaged. In any
    case it can be resumed without the limit. Does nothing where the limit is too low for the program to be loaded.
    """
    if world.start(['--version'], prepare=prepare).finish().status != 0:
        part.count('limits too low to start')
        return
    step = part.rng.randrange(1, setting.steps - 1)
    out = world.stopped(part.rng, setting, step, save_every=part.rng.choice((0, 1, 3)))
    before = world.check_folder(setting, out)
    process = world.start(world.train_arguments(setting, out, threads=threads), prepare=prepare)
    process.expect(status)
    if process.status == 0:
        world.check_done(setting, out)
        part.count('finished under a limit')
    else:
        if process.status == 1 and not re.search(sentence, process.err()):
            process.fail('it does not say: ' + sentence)
        after = world.check_folder(setting, out)
        if after is None or after < before:
            process.fail('the checkpoint of step %d is gone' % before)
        part.count('refused with a sentence' if process.status == 1 else 'ended by a signal')
    world.finish(setting, out)


# ---- Descriptors ----


def close_streams(closed):
    def prepare():
        for file in closed:
            os.close(file)
    return prepare


class Commands:
    """One call of each command, and what it must give."""

    def __init__(self, world):
        self.world = world
        self.input, self.output = world.work + '/input.safetensors', world.work + '/output.safetensors'
        write_safetensors(self.input, {'x': ([64, 3], [0.25 * i for i in range(192)])})
        self.trained = world.reference(NARROW)[0]
        self.expected = {}
        for name in ('sample', 'run', 'ops', 'check'):
            self.expected[name] = self.printed(world.start(self.arguments(name, self.output)).expect(0), self.output)

    def printed(self, process, output):
        """Its output without what differs from call to call: the path, and the time that it took."""
        return re.sub(r'[0-9.]+ s\n', 's\n', process.out().replace(output, 'OUTPUT'))

    def arguments(self, name, output):
        return {'sample': ['sample', self.trained, '--bytes', '20'],
                'run': ['run', 'cumsum.forward', self.input, '-o', output],
                'ops': ['ops', 'layer_norm', '--device', 'ref,cpu'],
                'check': ['check', 'cumsum', '--quick', '--device', 'cpu', '--dtype', 'f32']}[name]

    def without_streams(self, part, name, closed):
        """Nothing that is printed ends up in a file, and the status says whether the output could be written."""
        world, folder = self.world, self.world.fresh('streams')
        if name == 'train':
            setting = part.rng.choice((NARROW, SUMS))
            process = world.start(world.train_arguments(setting, folder, save_every=9), prepare=close_streams(closed))
            process.expect(0)
            world.check_done(setting, folder)
        else:
            os.mkdir(folder)
            output = folder + '/output'
            process = world.start(self.arguments(name, output), prepare=close_streams(closed), cwd=folder)
            process.expect(1 if 1 in closed else 0)
            if 1 not in closed and self.printed(process, output) != self.expected[name]:
                process.fail('its output differs')
            if 1 in closed and 2 not in closed and 'standard output cannot be written' not in process.err():
                process.fail('no sentence on stderr')
            if os.listdir(folder) != (['output'] if name == 'run' else []):
                process.fail('it left files: ' + ' '.join(os.listdir(folder)))
            if name == 'run' and not filecmp.cmp(output, self.output, shallow=False):
                process.fail('its file differs')
        if (1 in closed and process.out()) or (2 in closed and process.err()):
            process.fail('it wrote to a closed stream')
        if process.status == 0 and process.err():
            process.fail('it complains on stderr')
        shutil.rmtree(folder)
        part.count('calls with closed streams', bool(closed))

    def few_files(self, part, name, count):
        """A limit of open files: the right result, or a sentence."""
        if name == 'train':
            resume_limited(self.world, part, part.rng.choice((NARROW, SUMS)), limit(resource.RLIMIT_NOFILE, count))
            return
        prepare = limit(resource.RLIMIT_NOFILE, count)
        if self.world.start(['--version'], prepare=prepare).finish().status != 0:
            part.count('limits too low to start')
            return
        output = self.world.fresh('output')
        process = self.world.start(self.arguments(name, output), prepare=prepare).expect((0, 1))
        if process.status == 0 and self.printed(process, output) != self.expected[name]:
            process.fail('its output differs')
        if process.status == 1 and not re.search('vjp.*: .|FAIL|fail', process.err() + process.out()):
            process.fail('no sentence')
        part.count('finished under a limit' if process.status == 0 else 'refused with a sentence')


def descriptors(world, part):
    commands = Commands(world)
    names = ('train', 'sample', 'run', 'ops', 'check')
    cases = [(commands.without_streams, name, closed) for name in names
             for count in range(4) for closed in itertools.combinations(range(3), count)]
    cases += [(commands.few_files, name, None) for name in names for _ in range(2)]
    for call, name, closed in part.rounds(cases):
        value = part.rng.randrange(3, 20) if closed is None else closed
        part.attempt('%s with %s' % (name, 'at most %d files' % value if closed is None else
                                     'closed %s' % ' '.join(map(str, closed))), call, part, name, value)


# ---- One core ----


class OneCore:
    """Processor time of the same run with several numbers of threads that share one core."""

    BAR = 1.3  # printed beside the ratio, which other work on that core changes: it decides nothing
    THREADS = (1, 2, 8)

    def __init__(self):
        self.best, self.model = {}, None

    def measure(self, world, part):
        core = part.rng.choice(sorted(os.sched_getaffinity(0)))
        for threads in self.THREADS:
            out = world.fresh('core')
            process = world.start(['train', world.text, '--preset', 'tiny', '--batch', '2', '--context', '32',
                                   '--steps', '8', '--save-every', '0', '--validate-every', '0', '--threads',
                                   str(threads), '--out', out], prepare=lambda: os.sched_setaffinity(0, {core}))
            process.expect(0, 'done at step 8,')
            with open(out + '/latest/model.safetensors', 'rb') as file:
                model = file.read()
            self.model = self.model or model
            if model != self.model:
                process.fail('other bytes in model.safetensors')
            self.best[threads] = min(process.seconds, self.best.get(threads, process.seconds))
            shutil.rmtree(out)
        part.count('runs on one core', len(self.THREADS))

    def tell(self, part):
        ratios = {threads: self.best[threads] / self.best[1] for threads in self.THREADS[1:]}
        part.note('on one core ' + ' and '.join('%d threads take %.2f' % pair for pair in ratios.items()) +
                  ' of the processor time of one (bar %.1f)' % self.BAR)


# ---- Control groups ----


class Group:
    """A control group with one limit, for the processes started in it. Version 1 or 2; OSError: not possible here."""

    def __init__(self, controller, value):
        name = 'vjp-stress-%d' % os.getpid()
        first = '/sys/fs/cgroup/' + controller
        self.folder = (first if os.path.isdir(first) else '/sys/fs/cgroup') + '/' + name
        os.mkdir(self.folder)
        try:
            if controller == 'pids':
                self.write('pids.max', value)
            elif os.path.isdir(first):
                self.write('cpu.cfs_quota_us', value)
                self.write('cpu.cfs_period_us', 100000)
            else:
                self.write('cpu.max', '%d 100000' % value)
        except OSError:
            os.rmdir(self.folder)
            raise

    def write(self, name, value):
        with open(self.folder + '/' + name, 'w') as file:
            file.write(str(value))

    def enter(self):
        self.write('cgroup.procs', os.getpid())

    def remove(self):
        for _ in range(100):  # a process that has just ended may still be counted
            try:
                os.rmdir(self.folder)
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            time.sleep(0.01)


def in_group(world, part, controller, value, use):
    try:
        group = Group(controller, value)
    except OSError as error:
        part.note('skipped: control group for %s, because it cannot be made (%s)' % (controller, error.strerror))
        return
    try:
        use(group)
    finally:
        group.remove()
    part.count('runs in a control group')


def group_time(world, part):
    """The number of threads follows the quota, and the bits are the same."""
    quota = part.rng.choice((20000, 50000, 100000, 150000, 200000))
    without = re.search(r'"threads": (\d+)', world.start(['info', '--json']).expect(0, '"threads": ').out())
    processors = min(-(-quota // 100000), int(without.group(1)))

    def use(group):
        out = world.fresh('quota')
        process = world.start(world.train_arguments(NARROW, out, save_every=9), prepare=group.enter)
        process.expect(0, r'\b%d thread' % processors)
        world.check_done(NARROW, out)
        shutil.rmtree(out)
        resume_limited(world, part, part.rng.choice(SETTINGS), group.enter, status=0)

    in_group(world, part, 'cpu', quota, use)


def group_threads(world, part):
    """Where no thread can be started, the calling thread does the work."""
    in_group(world, part, 'pids', part.rng.randrange(1, 5),
             lambda group: resume_limited(world, part, part.rng.choice(SETTINGS), group.enter, status=0, threads=8))


# ---- Limits of a process ----


def memory(world, part):
    """ulimit -v: from too little to load the program to more than it needs."""
    bytes_allowed = int(part.rng.uniform(16, 400)) << 20
    resume_limited(world, part, part.rng.choice(SETTINGS), limit(resource.RLIMIT_AS, bytes_allowed),
                   threads=part.rng.choice((1, 4, 16)))


def stack(world, part):
    """ulimit -s. Below 4 MiB a program that was built without optimisation does not fit."""
    kilobytes = part.rng.choice((256, 512, 1024, 2048, 4096, 8192, 65536, -1))
    allowed = 0 if kilobytes >= 4096 or kilobytes < 0 else (0, -signal.SIGSEGV)
    resume_limited(world, part, part.rng.choice(SETTINGS),
                   limit(resource.RLIMIT_STACK, kilobytes * 1024 if kilobytes > 0 else resource.RLIM_INFINITY), allowed)


def file_size(world, part):
    """ulimit -f, as a disk that is full in the middle of a file; the signal is ignored, or ends the process."""
    setting = part.rng.choice(SETTINGS)
    bytes_allowed = int(2 ** part.rng.uniform(6, 23))
    ignored = part.rng.random() < 0.7

    def prepare():
        if ignored:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        limit(resource.RLIMIT_CORE, 0)()
        limit(resource.RLIMIT_FSIZE, bytes_allowed)()

    resume_limited(world, part, setting, prepare, (0, 1) if ignored else (0, 1, -signal.SIGXFSZ), '')


# ---- Limits that do not bind root ----

OTHER = 54321  # a user that has no processes


def as_user(more):
    """Limits and permissions do not bind root: becomes another user first."""
    def prepare():
        if os.getuid() == 0:
            os.setgid(OTHER)
            os.setuid(OTHER)
        more()
    return prepare


def give_to_user(folder):
    if os.getuid() != 0:
        return
    for path, folders, files in os.walk(folder):
        for name in [path] + [os.path.join(path, name) for name in files]:
            os.chown(name, OTHER, OTHER, follow_symlinks=False)


def user_can_run(world, part, what):
    if world.start(['--version'], prepare=as_user(lambda: None)).finish().status == 0:
        return True
    part.note('skipped: %s, because another user than root cannot run %s' % (what, world.vjp))
    return False


def resume_as_user(world, part, prepare, status, locked=()):
    setting = part.rng.choice(SETTINGS)
    out = world.stopped(part.rng, setting, part.rng.randrange(1, setting.steps - 1))
    give_to_user(out)
    for path in [out + '/' + name for name in locked]:
        os.chmod(path, 0o500 if os.path.isdir(path) else 0o400)
    process = world.start(world.train_arguments(setting, out, threads=8), prepare=as_user(prepare))
    process.expect(status)
    for path, _, _ in os.walk(out):
        os.chmod(path, 0o700)
    if os.path.exists(out + '/.lock'):
        os.chmod(out + '/.lock', 0o600)
    if process.status == 1 and not re.search(r'vjp train: .*(Permission denied|Read-only)', process.err()):
        process.fail('it does not give the reason')
    if process.status == 0 and not locked:  # a read-only checkpoint cannot be removed when it is old
        world.check_done(setting, out)
    world.check_folder(setting, out)
    part.count('finished under a limit' if process.status == 0 else 'refused with a sentence')
    world.finish(setting, out)


def processes_of_user(world, part):
    """ulimit -u: where no thread can be started, the calling thread does the work."""
    if user_can_run(world, part, 'ulimit -u'):
        resume_as_user(world, part, limit(resource.RLIMIT_NPROC, part.rng.randrange(0, 6)), 0)


def read_only(world, part):
    """A folder, its newest checkpoint or its record without the right to write."""
    if not user_can_run(world, part, 'a read-only folder'):
        return
    places = [[''], ['latest'], ['metrics.jsonl'], ['.lock'], ['', '.lock'], ['metrics.jsonl', '']]
    locked = part.rng.choice(places)
    resume_as_user(world, part, lambda: None, 1 if '' in locked or '.lock' in locked else (0, 1), locked=locked)


# ---- A full disk ----


def mount(*arguments):
    return subprocess.run(['mount', *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          check=False)


def full_disk(world, part):
    """
    A small disk, or one that something else fills while the run saves, several times with other sizes. The narrow model
    is tried most: its small files are a large part of its checkpoint, so that the disk is often full in one of them.
    """
    rng = part.rng
    setting = rng.choice(SETTINGS + [NARROW] * len(SETTINGS))
    reference, seconds = world.reference(setting)
    one = sum(os.path.getsize(reference + '/latest/' + name) for name in os.listdir(reference + '/latest'))
    folder = world.fresh('disk')
    os.mkdir(folder)
    made = mount('-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', folder)
    if made.returncode != 0:
        part.note('skipped: a full disk, because none can be mounted (%s)' %
                  made.stderr.split('\n')[0].split(': ')[-1].rstrip('.'))
        os.rmdir(folder)
        return
    try:
        out, filler = folder + '/run', folder + '/filler'
        for _ in range(rng.randint(1, 10)):
            # Less than is used already is not accepted; then the size remains.
            mount('-o', 'remount,size=%d' % (one * rng.uniform(0.3, 4.5) + 16384), folder)
            process = world.start(world.train_arguments(setting, out, save_every=rng.choice((1, 2, 5))))
            if rng.random() < 0.5:
                wait(rng.uniform(0, seconds), process)
                fill(filler)
            process.expect((0, 1), r'No space left on device|at step')
            world.check_folder(setting, out)
            part.count('finished under a limit' if process.status == 0 else 'refused with a sentence')
            if os.path.exists(filler):
                os.remove(filler)
            if part.is_over():
                break
        mount('-o', 'remount,size=1g', folder)
        world.finish(setting, out)
    finally:
        subprocess.run(['umount', folder], check=False)
    os.rmdir(folder)


def fill(path):
    try:
        with open(path, 'wb', buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


CASES = {'control group for cpu': group_time, 'control group for pids': group_threads, 'ulimit -v': memory,
         'ulimit -s': stack, 'ulimit -f': file_size, 'ulimit -u': processes_of_user, 'read-only folder': read_only,
         'full disk': full_disk}


def limits(world, part):
    core = OneCore()
    cases = dict(CASES)
    if hasattr(os, 'sched_setaffinity'):
        cases['one core'] = core.measure
        part.attempt('one core', core.measure, world, part)
    else:
        del cases['control group for cpu']
        part.note('skipped: one core and control groups for cpu, because this system has no affinity')
    for name in part.rounds(cases):
        part.attempt(name, cases[name], world, part)
    if core.best:
        part.attempt('one core', core.tell, part)
