// SPDX-License-Identifier: MIT
// "Prove it": shows the rows of `vjp check` as they come from a worker, which is started when it is first needed: the
// model comes first.

const $ = (id) => document.getElementById(id);

/* A worker of prover.js. Its module is the variant that trains, so that there is one to load. */
export class Prover {
    static variant = undefined; // until the first module is loaded, or cannot be
    static gpu = false;         // whether the GPU is the chosen device

    static known = new Promise((resolve) => (Prover.know = resolve));

    constructor() {
        this.hears = new Map(); // from the kind of a message
        this.ready = null;
    }
    on(kind, hears) {
        this.hears.set(kind, hears);
    }
    /* Resolves with the op table once the module is there. `gpu`: the checks are of the GPU. */
    start(gpu = false) {
        if (this.ready && this.gpu !== gpu) this.end();
        this.gpu = gpu;
        this.ready ??= Prover.known.then(() => new Promise((resolve, reject) => {
            this.worker = new Worker('prover.js', {type: 'module'});
            this.worker.onerror = (event) => reject(new Error(event.message || 'the worker could not be loaded'));
            this.worker.onmessage = ({data}) => {
                if (data.kind === 'loaded') resolve(data.ops);
                else if (data.kind === 'failed' && data.during === 'load') reject(new Error(data.sentence));
                else this.hears.get(data.kind)(data);
            };
            this.worker.postMessage({kind: 'load', threads: 1, variant: Prover.variant, gpu});
        }));
        return this.ready;
    }
    post(message) {
        this.worker.postMessage(message);
    }
    end() {
        if (this.worker) this.worker.terminate();
        this.worker = this.ready = null;
    }
}

/* A row of a check in words. */
function words({proof, pass, output, dtype, case: shapes, error, bound, why}) {
    const what = [proof, pass, output, dtype, shapes].filter((w) => w).join(' ');
    return why ? `${what}: ${why}` : `${what}: error ${Number(error).toExponential(1)}, bound ${Number(bound).toExponential(0)}`;
}

export class Prove {
    constructor() {
        this.rows = new Map();
        this.prover = new Prover();
        this.prover.on('checking', (m) => this.checking(m.op));
        this.prover.on('row', (m) => this.row(m.op, m.row));
        this.prover.on('checked', (m) => this.checked(m));
        this.prover.on('proved', (m) => this.proved(m));
        this.prover.on('broken', (m) => this.broken(m));
        this.prover.on('failed', (m) => this.stop(m.sentence));
        $('check').addEventListener('click', () => this.checkAll());
        $('break').addEventListener('click', () => this.breakOne($('break-op').value));
        $('check-stop').addEventListener('click', () => this.stop('Stopped.'));
    }
    busy(is) {
        $('check').disabled = $('break').disabled = is;
        $('check-stop').hidden = !is;
    }
    clear() {
        this.rows.clear();
        this.passed = this.wrong = 0;
        $('checks').tBodies[0].replaceChildren();
        $('checks').hidden = false;
        this.busy(true);
        $('check-status').className = '';
    }
    async checkAll() {
        this.clear();
        $('check-status').textContent = `Loading a module for the checks${Prover.gpu ? ' of the GPU, which first compiles each shader' : ''}`;
        try {
            const ops = await this.prover.start(Prover.gpu);
            this.prover.post({kind: 'check', ops: ops.map((op) => op.name)});
        } catch (error) {
            this.stop(error.message);
        }
    }
    async breakOne(op) {
        this.clear();
        $('check-status').textContent = `Checking ${op} with one number of its result damaged`;
        try {
            await this.prover.start(Prover.gpu);
            this.prover.post({kind: 'break', op});
        } catch (error) {
            this.stop(error.message);
        }
    }
    checking(op) {
        const row = $('checks').tBodies[0].insertRow(0);
        const head = document.createElement('th');
        head.scope = 'row';
        head.textContent = op;
        row.append(head);
        const cells = [0, 1, 2].map(() => row.insertCell());
        cells[2].className = 'wide';
        this.rows.set(op, {cells, ok: 0, failed: 0, drawn: 0});
    }
    /* A line of the check; {ok, text}. Lines come by the thousand, so that only some are drawn; failures all are. */
    row(op, line) {
        const at = this.rows.get(op);
        if (line.ok) at.ok++;
        else at.failed++;
        this.passed += line.ok ? 1 : 0;
        this.wrong += line.ok ? 0 : 1;
        const now = performance.now();
        if (line.ok && now - at.drawn < 60) return;
        at.drawn = now;
        if (!at.failed || !line.ok) at.cells[2].textContent = words(line);
        this.counts(at);
    }
    counts(at) {
        at.cells[0].textContent = at.ok.toLocaleString('en');
        at.cells[1].textContent = at.failed ? at.failed.toLocaleString('en') : '0';
        at.cells[1].className = at.failed ? 'bad' : '';
        $('check-status').textContent = `${this.passed.toLocaleString('en')} passed, ${this.wrong.toLocaleString('en')} failed`;
    }
    checked({op, ok, failed}) {
        const at = this.rows.get(op);
        this.passed += ok - at.ok;
        this.wrong += failed - at.failed;
        [at.ok, at.failed] = [ok, failed];
        this.counts(at);
        at.cells[0].classList.toggle('good', !failed);
    }
    proved({seconds, failed}) {
        this.busy(false);
        $('check-status').className = failed ? 'bad' : 'good';
        $('check-status').textContent = `${this.passed.toLocaleString('en')} checks passed, ${failed.toLocaleString('en')} failed, in ${seconds.toFixed(1)} s.`;
    }
    broken({op, failed, ok}) {
        this.busy(false);
        $('check-status').className = failed ? 'good' : 'bad';
        $('check-status').textContent = failed
            ? `Caught: with one number of ${op} damaged, ${failed.toLocaleString('en')} of ${(ok + failed).toLocaleString('en')} checks failed.`
            : `Not caught: ${op} was damaged and ${ok.toLocaleString('en')} checks passed.`;
    }
    stop(sentence) {
        this.prover.end();
        this.busy(false);
        $('check-status').textContent = sentence;
    }
}
