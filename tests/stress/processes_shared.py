# SPDX-License-Identifier: MIT
"""Several processes and one folder: two trainings, a reader beside a writer, and a copy made while a run saves."""

import os
import re
import shutil
import signal
import subprocess

from processes_runs import SETTINGS, Failure, read_lines, saved_steps, wait_until
from processes_stops import wait

MAX_COPIES = 12  # of one run
REFUSED = r'another run is training there \(process (\d+)\)'


def start_at_once(world, commands):
    """Starts the processes at the same moment: each waits for the end of one pipe, then becomes vjp."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, False)
    shell = ['sh', '-c', 'read -r word; exec "$0" "$@" </dev/null', world.vjp]
    processes = [world.start(command, program=shell, stdin=reader) for command in commands]
    os.close(reader)
    os.close(writer)
    return processes


def race(world, part, resumed):
    """Two or three trainings in one folder: one trains, the others are refused and name the process that does."""
    rng = part.rng
    setting = rng.choice(SETTINGS)
    out = world.stopped(rng, setting, rng.randrange(1, setting.steps - 2)) if resumed else world.fresh_run(rng)
    commands = [world.train_arguments(setting, out, threads=rng.choice((1, 2))) for _ in range(rng.choice((2, 2, 3)))]
    processes = start_at_once(world, commands)
    pids = [process.pid for process in processes]
    trained = refused = 0
    for process in processes:
        process.expect((0, 1))
        found = re.search(REFUSED, process.err())
        if process.status == 0:
            # A resumed run that comes when the other has finished has nothing left to do.
            trained += 'step' in process.out()
        elif found:
            refused += 1
            if int(found.group(1)) == process.pid or int(found.group(1)) not in pids:
                process.fail('it names another process than ' + ' '.join(map(str, pids)))
        elif resumed or 'already holds a run' not in process.err():
            process.fail('it was refused without naming the other process')
    if trained != 1 and not (resumed and trained > 1):
        raise Failure('%s: %d of %d processes trained in one folder' % (out, trained, len(processes)))
    world.check_done(setting, out)
    shutil.rmtree(out)
    part.count('races for a folder')
    part.count('refusals', refused)


def race_to_begin(world, part):
    race(world, part, False)


def race_to_resume(world, part):
    race(world, part, True)


def killed_holder(world, part):
    """The lock of a killed run is free at once."""
    setting = part.rng.choice(SETTINGS)
    out = world.fresh_run(part.rng)
    process = world.start(world.train_arguments(setting, out))
    wait_until(process, lambda: saved_steps(out))
    process.signal(signal.SIGKILL)
    process.finish()
    world.finish(setting, out)
    part.count('locks of killed runs')


def readers(world, part):
    """`vjp sample` opens whole checkpoints while a training replaces them."""
    rng = part.rng
    setting = rng.choice(SETTINGS)
    out = world.fresh_run(rng)
    keep = rng.choice((1, 2, 2))
    process = world.start(world.train_arguments(setting, out, save_every=1, keep=keep))
    wait_until(process, lambda: os.path.exists(out + '/latest'))
    while process.running():
        count = rng.randrange(1, 4)
        sample = world.start(['sample', out, '--bytes', str(count), '--threads', '1']).expect(0)
        if os.path.getsize(sample.out_path) != count + 1:
            sample.fail('it did not print %d bytes and a newline' % count)
        part.count('samples during training')
    process.expect(0)
    world.check_done(setting, out)
    shutil.rmtree(out)


def copies(world, part):
    """
    A folder that is copied again and again while its run saves. Copies differ in what was being saved: all that have an
    incomplete `latest`, and one other, are resumed.
    """
    rng = part.rng
    setting = rng.choice(SETTINGS)
    out, made = world.fresh_run(rng), []
    options = {'save_every': rng.choice((1, 1, 3)), 'keep': rng.choice((2, 3))}
    process = world.start(world.train_arguments(setting, out, **options))
    wait_until(process, lambda: os.path.exists(out + '/latest'))
    while process.running() and len(made) < MAX_COPIES:
        wait(rng.uniform(0, 0.01), process)
        made.append(world.fresh('copy'))
        # Files that vanish during the copy make cp's status 1; that is not what is tested.
        subprocess.run(['cp', '-rL', out, made[-1]], stderr=subprocess.DEVNULL, check=False)
    process.expect(0)
    world.check_done(setting, out)
    torn = [copy for copy in made if not world.is_whole(setting, copy + '/latest')]
    others = [copy for copy in made if copy not in torn]
    for copy in torn + others[:1]:
        resume_copy(world, part, setting, copy)
    for folder in [out] + made:
        shutil.rmtree(folder)
    part.count('copies', len(made))
    part.count('of them torn', len(torn))


def resume_copy(world, part, setting, copy):
    """One whole checkpoint in a copy is enough to resume from."""
    folders = ['%s/checkpoint-%08d' % (copy, step) for step in saved_steps(copy)] + [copy + '/latest']
    process = world.start(['train', '--resume', '--out', copy])
    if not any(world.is_whole(setting, folder) for folder in folders):
        process.expect(1, 'vjp train: .')
        part.count('copies without a whole checkpoint')
        return
    process.expect(0, 'done at step %d,' % setting.steps)
    final = 'checkpoint-%08d' % setting.steps
    if os.readlink(copy + '/latest') != final or not world.is_whole(setting, copy + '/' + final, setting.steps):
        process.fail('it did not end with the bytes of the undisturbed run')
    # The record may have been copied before the checkpoint was: then steps between them are missing, which also changes
    # the smoothed losses, but none is there twice.
    lines, expected = [[re.sub(r'"smoothed": ?[^,]*, ?', '', line) for line in read_lines(folder + '/metrics.jsonl')[0]]
                       for folder in (copy, world.reference(setting)[0])]
    if [line for line in expected if line in lines] != lines or lines[-1:] != expected[-1:]:
        process.fail('%s/metrics.jsonl has other lines than the undisturbed run' % copy)
    part.count('copies resumed')


CASES = {'race to begin': race_to_begin, 'race to resume': race_to_resume, 'lock of a killed run': killed_holder,
         'samples': readers, 'copy': copies}


def two_processes(world, part):
    for name in part.rounds(CASES):
        part.attempt(name, CASES[name], world, part)
