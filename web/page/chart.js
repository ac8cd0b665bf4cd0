// SPDX-License-Identifier: MIT
// The loss curve on a canvas: every step's loss as a faint line, its moving average, validation as dots, the processor's
// losses as dashes over those of a GPU, and the loss of guessing as a dotted line. More points than pixels are drawn as the range that each pixel covers.

const MARGIN = {left: 40, right: 12, top: 14, bottom: 26};

/* A step of 1, 2 or 5 times a power of ten that gives about `count` parts. */
function tick(span, count) {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((m) => m * power).find((t) => t >= raw);
}

/* Adds a loss, and its average over about the last eighth of the steps, at most 50, as `vjp train` shows it. */
function append(losses, smooth, loss) {
    const i = losses.length, last = i ? smooth[i - 1] : loss;
    const share = 1 / Math.min(50, Math.max(1, (i + 1) / 8));
    losses.push(loss);
    smooth.push(last + share * (loss - last));
}

export class Chart {
    constructor(canvas, readout) {
        this.canvas = canvas;
        this.readout = readout;
        this.pointer = null;
        this.clear(1);
        const redraw = () => this.draw();
        new ResizeObserver(redraw).observe(canvas);
        matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
        canvas.addEventListener('pointermove', (e) => this.point(e.offsetX));
        canvas.addEventListener('pointerleave', () => this.point(null));
        canvas.addEventListener('keydown', (e) => this.key(e));
        canvas.addEventListener('blur', () => this.point(null));
    }
    /* Forgets everything; `steps` is the length of the run to come. */
    clear(steps) {
        this.steps = steps;
        this.losses = []; // of step i + 1
        this.smooth = [];
        this.validations = []; // [step, loss]
        this.others = [];      // the processor's losses, where a GPU trains
        this.othersSmooth = [];
        this.draw();
    }
    add(loss) {
        append(this.losses, this.smooth, loss);
    }
    /* The processor's loss of the next step. */
    addOther(loss) {
        append(this.others, this.othersSmooth, loss);
    }
    validation(step, loss) {
        this.validations.push([step, loss]);
    }
    point(x) {
        this.pointer = x;
        this.draw();
    }
    key(event) {
        const width = this.canvas.clientWidth, move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
        if (!move || !this.losses.length) return;
        event.preventDefault();
        const plot = width - MARGIN.left - MARGIN.right, one = Math.max(plot / this.span(), 2);
        const at = this.pointer === null ? this.x(this.losses.length) : this.pointer + move * one;
        this.point(Math.min(Math.max(at, MARGIN.left), width - MARGIN.right));
    }
    /* Steps along the axis: what has been taken, with room to grow, and never more than the run has. */
    span() {
        const n = Math.max(this.losses.length, 20);
        return Math.min(Math.max(this.steps, 20), Math.ceil(n * 1.08));
    }
    x(step) {
        const plot = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
        return MARGIN.left + (step / this.span()) * plot;
    }
    draw() {
        const {canvas} = this, ratio = devicePixelRatio || 1;
        const width = canvas.clientWidth, height = canvas.clientHeight;
        if (!width || !height) return;
        if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
        if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
        const style = getComputedStyle(canvas), colour = (name) => style.getPropertyValue(name).trim();
        const c = canvas.getContext('2d');
        c.setTransform(ratio, 0, 0, ratio, 0, 0);
        c.clearRect(0, 0, width, height);
        c.font = `12px ${style.fontFamily}`;

        const guess = Math.log(256);
        const all = this.losses.concat(this.validations.map((v) => v[1]));
        const top = Math.max(guess * 1.06, all.length ? Math.min(Math.max(...all.slice(-4096)), 12) * 1.03 : 0);
        const low = all.length ? Math.max(0, Math.floor(Math.min(...all.slice(-4096)) - 0.5)) : 0;
        const bottom = height - MARGIN.bottom;
        const y = (loss) => MARGIN.top + (1 - (loss - low) / (top - low)) * (bottom - MARGIN.top);

        c.strokeStyle = colour('--line');
        c.fillStyle = colour('--quiet');
        c.lineWidth = 1;
        c.textAlign = 'right';
        c.textBaseline = 'middle';
        for (let v = low; v <= top; v += tick(top - low, 6)) {
            c.beginPath();
            c.moveTo(MARGIN.left, Math.round(y(v)) + 0.5);
            c.lineTo(width - MARGIN.right, Math.round(y(v)) + 0.5);
            c.stroke();
            c.fillText(String(+v.toFixed(2)), MARGIN.left - 8, y(v));
        }
        c.textBaseline = 'alphabetic';
        const step = tick(this.span(), width > 500 ? 8 : 4);
        for (let s = 0; s <= this.span(); s += step) {
            c.textAlign = s === 0 ? 'left' : 'center';
            if (this.x(s) < width - 24) c.fillText(s === 0 ? 'step 0' : String(s), this.x(s), height - 6);
        }
        c.setLineDash([2, 4]);
        c.strokeStyle = colour('--quiet');
        c.beginPath();
        c.moveTo(MARGIN.left, y(guess));
        c.lineTo(width - MARGIN.right, y(guess));
        c.stroke();
        c.setLineDash([]);
        c.textAlign = 'right';
        c.fillText('guessing', width - MARGIN.right, y(guess) - 5);

        this.band(c, this.losses, y, colour('--train-faint'));
        this.curve(c, this.smooth, y, colour('--train'));
        // Averaged as well, and on top: where it hides what is below, the two are equal.
        c.setLineDash([5, 4]);
        this.curve(c, this.othersSmooth, y, colour('--other'), 1.5);
        c.setLineDash([]);
        c.strokeStyle = c.fillStyle = colour('--validation');
        c.lineWidth = 1.5;
        c.beginPath();
        this.validations.forEach(([s, v], i) => (i ? c.lineTo(this.x(s), y(v)) : c.moveTo(this.x(s), y(v))));
        c.stroke();
        for (const [s, v] of this.validations) {
            c.beginPath();
            c.arc(this.x(s), y(v), 3, 0, 2 * Math.PI);
            c.fill();
        }
        this.cross(c, y, height, colour('--quiet'));
    }
    curve(c, values, y, colour, width = 2) {
        c.strokeStyle = colour;
        c.lineWidth = width;
        c.lineJoin = 'round';
        c.beginPath();
        const skip = Math.max(1, Math.floor(values.length / 1500));
        for (let i = 0; i < values.length; i += skip) c.lineTo(this.x(i + 1), y(values[i]));
        if (values.length) c.lineTo(this.x(values.length), y(values[values.length - 1]));
        c.stroke();
    }
    band(c, values, y, colour) {
        c.strokeStyle = colour;
        c.lineWidth = 1;
        c.beginPath();
        let at = -1, high = 0, low = 0;
        values.forEach((v, i) => {
            const x = Math.round(this.x(i + 1));
            if (x !== at && at >= 0) {
                c.lineTo(at, y(high));
                c.lineTo(at, y(low));
            }
            high = x === at ? Math.max(high, v) : v;
            low = x === at ? Math.min(low, v) : v;
            at = x;
        });
        if (at >= 0) c.lineTo(at, y(low));
        c.stroke();
    }
    cross(c, y, height, colour) {
        const n = this.losses.length;
        if (this.pointer === null || !n) {
            this.readout.textContent = '';
            return;
        }
        const plot = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
        const at = Math.round(((this.pointer - MARGIN.left) / plot) * this.span());
        const step = Math.min(Math.max(at, 1), n);
        c.strokeStyle = colour;
        c.lineWidth = 1;
        c.beginPath();
        c.moveTo(Math.round(this.x(step)) + 0.5, MARGIN.top);
        c.lineTo(Math.round(this.x(step)) + 0.5, height - MARGIN.bottom);
        c.stroke();
        const near = this.validations.filter((v) => v[0] <= step).pop();
        this.readout.textContent = `step ${step}: loss ${this.losses[step - 1].toFixed(4)}, average ` +
            `${this.smooth[step - 1].toFixed(4)}${near ? `, validation ${near[1].toFixed(4)} at step ${near[0]}` : ''}${this.others[step - 1] ? `, processor ${this.others[step - 1].toFixed(4)}` : ''}`;
    }
}
