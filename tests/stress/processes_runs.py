# SPDX-License-Identifier: MIT
"""Training runs for the stress tests: models small enough to train in a fraction of a second, the undisturbed run of
each, processes that are started under limits, and the comparison of a disturbed run's folder with the undisturbed one.
"""

import filecmp
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
import xml.dom.minidom

HANG = 120  # seconds after which a process counts as hanging: none takes more than two, also on a busy machine


class Failure(Exception):
    """The program did something wrong; the text says what."""


class Setting:
    """A model, by its width and layers, and the options of its training."""

    def __init__(self, name, width, layers, steps, options):
        self.name, self.width, self.layers, self.steps, self.options = name, width, layers, steps, options


SETTINGS = [
    Setting('narrow', 16, 1, 120, ['--batch', '1', '--context', '8', '--validate-every', '7']),
    # validates after every step, and its gradients are a sum
    Setting('sums', 32, 2, 40, ['--batch', '2', '--context', '16', '--validate-every', '1', '--accumulate', '2',
                                '--dtype', 'bf16']),
    # large enough that its products are split among threads
    Setting('wide', 96, 2, 24, ['--batch', '4', '--context', '32', '--validate-every', '5']),
    # one byte per step: most of the time is the update of the parameters
    Setting('updates', 128, 2, 24, ['--batch', '1', '--context', '1', '--validate-every', '0']),
]
NARROW, SUMS, WIDE, UPDATES = SETTINGS


def write_safetensors(path, tensors):
    """tensors: {name: (shape, list of floats)}"""
    header, data = {}, b''
    for name, (shape, values) in tensors.items():
        block = struct.pack('<%df' % len(values), *values)
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [len(data), len(data) + len(block)]}
        data += block
    text = json.dumps(header).encode()
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + data)


def write_model(folder, width, layers):
    """A Llama of bytes with random weights, in the files of Hugging Face."""
    rng = random.Random(width)
    names = {'model.embed_tokens.weight': [256, width], 'model.norm.weight': [width]}
    for i in range(layers):
        layer = 'model.layers.%d.' % i
        names.update({layer + 'input_layernorm.weight': [width], layer + 'post_attention_layernorm.weight': [width]})
        for part in ['self_attn.%s_proj' % p for p in 'qkvo'] + ['mlp.%s_proj' % p for p in ('gate', 'up', 'down')]:
            names[layer + part + '.weight'] = [width, width]
    tensors = {}
    for name, shape in names.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        tensors[name] = shape, [1.0] * count if len(shape) == 1 else [rng.gauss(0, 0.1) for _ in range(count)]
    os.mkdir(folder)
    write_safetensors(folder + '/model.safetensors', tensors)
    with open(folder + '/config.json', 'w') as file:
        json.dump({'model_type': 'llama', 'vocab_size': 256, 'hidden_size': width, 'intermediate_size': width,
                   'num_hidden_layers': layers, 'num_attention_heads': 2, 'num_key_value_heads': 2,
                   'max_position_embeddings': 64, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': True}, file)


class Process:
    """A vjp that was started. Its output goes to files, or where `stdout` and `stderr` say."""

    def __init__(self, world, arguments, prepare=None, stdout=None, stderr=None, program=None, stdin=None, cwd=None):
        self.arguments = arguments
        name = world.fresh('output')
        self.out_path, self.err_path = name + '.out', name + '.err'
        with open(self.out_path, 'wb') as out, open(self.err_path, 'wb') as err:
            self.popen = subprocess.Popen(
                (program or [world.vjp]) + arguments, preexec_fn=prepare, env=world.environment, cwd=cwd,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out if stdout is None else stdout, stderr=err if stderr is None else stderr)
        self.pid = self.popen.pid
        self.status = None  # minus the signal that ended it
        self.seconds = 0.0  # of processor time

    def running(self):
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status = self.popen.returncode = os.waitstatus_to_exitcode(status)
                self.seconds = usage.ru_utime + usage.ru_stime
        return self.status is None

    def signal(self, number):
        """False: it had ended before."""
        if not self.running():
            return False
        os.kill(self.pid, number)
        return True

    def finish(self):
        end = time.monotonic() + HANG
        while self.running():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                self.popen.wait()
                raise Failure('%s: still running after %d s' % (self, HANG))
            time.sleep(0.001)
        return self

    def out(self):
        return read_text(self.out_path)

    def err(self):
        return read_text(self.err_path)

    def __str__(self):
        return 'vjp ' + ' '.join(self.arguments)

    def fail(self, what):
        raise Failure('%s: %s; status %s\n    stdout: %s\n    stderr: %s' %
                      (self, what, self.status, self.out()[-300:].strip(), self.err()[-300:].strip()))

    def expect(self, status, pattern=None):
        """Waits for the end: that status (or one of several); on failure a sentence, which matches the pattern."""
        self.finish()
        allowed = status if isinstance(status, tuple) else (status,)
        if self.status not in allowed:
            self.fail('its status is not ' + ' or '.join(map(str, allowed)))
        text = self.out() if self.status == 0 else self.err()
        if pattern and self.status >= 0 and not re.search(pattern, text):
            self.fail('it does not say: ' + pattern)
        return self


def read_text(path):
    with open(path, errors='replace') as file:
        return file.read()


def read_lines(path):
    """The whole lines of a record, without the time that each step took, and whether a part of a line follows."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return [], False
    lines = [re.sub(r', ?"seconds".*', '', line) for line in text.split('\n')]
    return lines[:-1], lines[-1] != ''


def saved_steps(out):
    """The steps of the checkpoints in a folder, in order."""
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return []
    return sorted(int(name[11:]) for name in names if re.fullmatch(r'checkpoint-\d{8,}', name))


class World:
    """The folder of one invocation, the program, and the undisturbed runs."""

    def __init__(self, vjp, work, disk):
        self.vjp, self.work, self.disk, self.number = vjp, work, disk, 0
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith('VJP_')}
        self.environment.update(NODEVICE_SELECT='1', LC_ALL='C')
        self.references, self.processes = {}, []
        self.text = work + '/text'
        with open(self.text, 'w') as file:
            for i in range(200):
                file.write('line %d: the quick brown fox learns to jump over %d dogs\n' % (i, i * i))

    def fresh(self, name):
        self.number += 1
        return '%s/%s-%d' % (self.work, name, self.number)

    def fresh_run(self, rng):
        """A new folder for a run: mostly in memory, which is many times faster, and sometimes on the disk."""
        self.number += 1
        return '%s/run-%d' % (self.disk if rng.random() < 0.1 else self.work, self.number)

    def start(self, arguments, **how):
        self.processes = [process for process in self.processes if process.status is None]
        self.processes.append(Process(self, arguments, **how))
        return self.processes[-1]

    def end_processes(self):
        """After a failure a process may still run, or be stopped."""
        for process in self.processes:
            if process.signal(signal.SIGKILL):
                process.finish()
        self.processes = []

    def begin_arguments(self, setting, save_every, keep=2):
        model = '%s/model-%s' % (self.work, setting.name)
        if not os.path.exists(model):
            write_model(model, setting.width, setting.layers)
        return ['train', self.text, '--from', model, '--steps', str(setting.steps), '--warmup', '2', '--save-every',
                str(save_every), '--keep', str(keep)] + setting.options

    def train_arguments(self, setting, out, save_every=1, keep=2, threads=None):
        """Resumes the run in `out`, or begins it where nothing was saved."""
        arguments = ['train', '--resume'] if saved_steps(out) else self.begin_arguments(setting, save_every, keep)
        return arguments + (['--threads', str(threads)] if threads else []) + ['--out', out]

    def reference(self, setting):
        """The undisturbed run, with a checkpoint of every step, and how long it took."""
        if setting.name not in self.references:
            out = '%s/reference-%s' % (self.work, setting.name)
            begin = time.monotonic()
            arguments = self.begin_arguments(setting, 1, keep=1000) + ['--threads', '1', '--out', out]
            self.start(arguments).expect(0, 'done at step %d,' % setting.steps)
            self.references[setting.name] = out, time.monotonic() - begin
            zero = out + '-0'  # what a run saves that is stopped before its first step
            self.start(arguments[:-1] + [zero, '--stop-at', '0']).expect(0)
            os.rename(zero + '/checkpoint-00000000', out + '/checkpoint-00000000')
        return self.references[setting.name]

    def stopped(self, rng, setting, step, **options):
        """A new folder with a run that was stopped at that step."""
        out = self.fresh_run(rng)
        arguments = self.train_arguments(setting, out, **options) + ['--stop-at', str(step)]
        self.start(arguments).expect(0, '(stopped|done) at step %d,' % step)
        return out

    def is_whole(self, setting, folder, step=None):
        """Whether it has the bytes of the undisturbed run's checkpoint of that step; None: of any."""
        try:
            settings = json.loads(read_text(folder + '/trainer.json'))
            reference = '%s/checkpoint-%08d/' % (self.reference(setting)[0], settings['step'])
            return step in (None, settings['step']) and all(
                filecmp.cmp(folder + '/' + name, reference + name, shallow=False)
                for name in ('config.json', 'model.safetensors', 'optimizer.safetensors'))
        except (OSError, ValueError):
            return False

    def check_folder(self, setting, out):
        """
        What must be true of a run's folder whatever happened, while no process works in it: each checkpoint is whole
        and has the undisturbed run's bytes, `latest` leads to one of them, and the record has a line for every step up
        to it and agrees with the undisturbed one. Returns the step that a resumed run would begin with, or None.
        """
        steps = saved_steps(out)
        for step in steps:
            if not self.is_whole(setting, '%s/checkpoint-%08d' % (out, step), step):
                raise Failure('%s/checkpoint-%08d is not the undisturbed run\'s' % (out, step))
        lines, partial = read_lines(out + '/metrics.jsonl')
        expected, _ = read_lines(self.reference(setting)[0] + '/metrics.jsonl')
        if lines != expected[:len(lines)]:
            raise Failure('%s/metrics.jsonl: other lines than the undisturbed run\'s' % out)
        if not steps:
            return None
        if os.path.lexists(out + '/latest'):
            target = os.readlink(out + '/latest')
            if not re.fullmatch(r'checkpoint-\d{8}', target) or int(target[11:]) not in steps:
                raise Failure('%s/latest leads to %s, which is not there' % (out, target))
        if len(lines) < steps[-1]:
            raise Failure('%s/metrics.jsonl ends at step %d, before the checkpoint of step %d' %
                          (out, len(lines), steps[-1]))
        return steps[-1]

    def check_stopped(self, setting, out, text=''):
        """As check_folder(), for a run that ended by itself: the last step is saved, and nothing is left over."""
        step = self.check_folder(setting, out)
        lines, partial = read_lines(out + '/metrics.jsonl')
        link = os.readlink(out + '/latest') if os.path.lexists(out + '/latest') else 'nothing'
        if partial or step != len(lines) or link != 'checkpoint-%08d' % step:
            raise Failure('%s: the record has %d steps, latest leads to %s' % (out, len(lines), link))
        left = [name for name in os.listdir(out) if 'tmp' in name]
        if left:
            raise Failure('%s: left over: %s' % (out, ' '.join(left)))
        said = re.search(r'(?:stopped|done|saved) at step (\d+)', text)
        if said and int(said.group(1)) != step:
            raise Failure('%s: it said "%s", but step %d is saved' % (out, said.group(0), step))
        return step

    def check_done(self, setting, out):
        step = self.check_stopped(setting, out)
        if step != setting.steps:
            raise Failure('%s: ends at step %d of %d' % (out, step, setting.steps))
        reference = self.reference(setting)[0]
        for name in ('loss.svg', '.lock'):
            if not filecmp.cmp(out + '/' + name, reference + '/' + name, shallow=False):
                raise Failure('%s/%s: other bytes than the undisturbed run\'s' % (out, name))
        xml.dom.minidom.parse(out + '/loss.svg')

    def finish(self, setting, out, **options):
        """Resumes (or begins) without any disturbance: the run must end with the undisturbed run's bytes."""
        self.start(self.train_arguments(setting, out, **options)).expect(0, 'done at step %d,' % setting.steps)
        self.check_done(setting, out)
        shutil.rmtree(out)


def has_temporary(out):
    """Whether a checkpoint is being saved, or was when the process was killed."""
    try:
        return any(name.endswith('.tmp') and name.startswith('.checkpoint-') for name in os.listdir(out))
    except FileNotFoundError:
        return False


def wait_until(process, condition):
    """Until the condition holds or the process has ended; False: it ended."""
    end = time.monotonic() + HANG
    while process.running():
        if condition():
            return True
        if time.monotonic() > end:
            raise Failure('%s: nothing happened for %d s' % (process, HANG))
    return False


def limit(what, value):
    return lambda: resource.setrlimit(what, (value, value))
