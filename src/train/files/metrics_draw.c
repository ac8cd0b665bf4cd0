/* SPDX-License-Identifier: MIT */
/*
 * loss.svg: the loss of every step as a pale line, the smoothed loss over it, validation as points. For a long run each
 * column of pixels shows the lowest and the highest loss of its steps, so that the file stays small.
 */
#include "train/files/metrics_rows.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "core/system.h"

enum { WIDTH = 960, HEIGHT = 540, LEFT = 76, RIGHT = 28, TOP = 64, BOTTOM = 56 };
enum { PLOT_WIDTH = WIDTH - LEFT - RIGHT, PLOT_HEIGHT = HEIGHT - TOP - BOTTOM };

typedef struct plot {
    const metrics *m;
    FILE *file;
    double low, high, step; /* of the loss, and of its lines */
    int64_t first, last;
} plot;

static double x_of(const plot *p, int64_t step) {
    double span = p->last > p->first ? (double)(p->last - p->first) : 1;
    return LEFT + PLOT_WIDTH * (double)(step - p->first) / span;
}

static double y_of(const plot *p, double loss) {
    return TOP + PLOT_HEIGHT * (p->high - loss) / (p->high - p->low);
}

/* 1, 2 or 5 times a power of ten, so that about `count` of them fit into the range. */
static double tick(double range, int count) {
    double rough = range / count, power = pow(10, floor(log10(rough))), part = rough / power;
    return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
}

static void find_range(plot *p) {
    p->low = INFINITY;
    p->high = -INFINITY;
    for (size_t i = 0; i < p->m->count; i++) {
        const metrics_row *r = &p->m->row[i];
        p->low = fmin(p->low, fmin(r->loss, r->validation));
        p->high = fmax(p->high, fmax(r->loss, r->validation));
    }
    if (!(p->high > p->low)) {
        p->high = p->m->count ? p->high + 0.5 : 1;
        p->low = p->m->count ? p->low - 0.5 : 0;
    }
    p->step = tick(p->high - p->low, 6);
    p->low = floor(p->low / p->step) * p->step;
    p->high = ceil(p->high / p->step) * p->step;
    p->first = p->m->count ? p->m->row[0].step : 0;
    p->last = p->m->count ? p->m->row[p->m->count - 1].step : 1;
}

static void draw_axes(const plot *p) {
    for (int i = 0; p->low + i * p->step <= p->high + p->step / 2; i++) {
        double loss = p->low + i * p->step, y = y_of(p, loss);
        fprintf(p->file, "<path d=\"M%d,%.1f H%d\" class=\"grid\"/><text x=\"%d\" y=\"%.1f\" class=\"y\">%g</text>\n",
                LEFT, y, WIDTH - RIGHT, LEFT - 10, y + 4, loss);
    }
    double every = fmax(1, tick((double)(p->last - p->first) + 1, 8));
    for (double at = ceil((double)p->first / every) * every; at <= (double)p->last; at += every)
        fprintf(p->file, "<text x=\"%.1f\" y=\"%d\" class=\"x\">%.0f</text>\n", x_of(p, (int64_t)at),
                HEIGHT - BOTTOM + 22, at);
    fprintf(p->file, "<text x=\"%d\" y=\"%d\" class=\"x\">step</text>\n", LEFT + PLOT_WIDTH / 2, HEIGHT - 14);
    fprintf(p->file, "<text transform=\"translate(22,%d) rotate(-90)\" class=\"x\">loss</text>\n",
            TOP + PLOT_HEIGHT / 2);
}

/* For each column of pixels, a line from its lowest to its highest loss. */
static void draw_losses(const plot *p) {
    fprintf(p->file, "<path class=\"raw\" d=\"");
    char command = 'M';
    for (size_t i = 0; i < p->m->count;) {
        double low = INFINITY, high = -INFINITY, x = floor(x_of(p, p->m->row[i].step) * 2) / 2;
        double mid = x;
        size_t begin = i;
        for (; i < p->m->count && (i == begin || x_of(p, p->m->row[i].step) < x + 0.5); i++) {
            low = fmin(low, p->m->row[i].loss);
            high = fmax(high, p->m->row[i].loss);
            mid = x_of(p, p->m->row[i].step);
        }
        fprintf(p->file, "%c%.1f,%.1f", command, mid, y_of(p, low));
        if (high > low) fprintf(p->file, "V%.1f", y_of(p, high));
        command = 'L';
    }
    fprintf(p->file, "\"/>\n");
}

static void draw_smoothed(const plot *p) {
    fprintf(p->file, "<path class=\"smooth\" d=\"");
    double drawn = -1;
    for (size_t i = 0; i < p->m->count; i++) {
        double x = x_of(p, p->m->row[i].step);
        if (x < drawn + 1 && i + 1 < p->m->count) continue;
        fprintf(p->file, "%c%.1f,%.1f", drawn < 0 ? 'M' : 'L', x, y_of(p, p->m->row[i].smoothed));
        drawn = x;
    }
    fprintf(p->file, "\"/>\n");
}

static void draw_validation(const plot *p) {
    for (size_t i = 0; i < p->m->count; i++) {
        const metrics_row *r = &p->m->row[i];
        if (isnan(r->validation)) continue;
        fprintf(p->file,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" class=\"valid\"><title>step %lld: %.4f</title></circle>\n",
                x_of(p, r->step), y_of(p, r->validation), (long long)r->step, r->validation);
    }
}

static void draw_legend(const plot *p) {
    int x = WIDTH - RIGHT - 330, y = TOP + 18;
    fprintf(p->file,
            "<path d=\"M%d,%d h22\" class=\"raw\" stroke-width=\"3\"/><text x=\"%d\" y=\"%d\">a step</text>\n"
            "<path d=\"M%d,%d h22\" class=\"smooth\"/><text x=\"%d\" y=\"%d\">smoothed</text>\n"
            "<circle cx=\"%d\" cy=\"%d\" r=\"4\" class=\"valid\"/><text x=\"%d\" y=\"%d\">validation</text>\n",
            x, y, x + 28, y + 4, x + 100, y, x + 128, y + 4, x + 222, y, x + 234, y + 4);
}

static void put_escaped(FILE *file, const char *text) {
    for (; *text; text++) {
        if (*text == '&' || *text == '<')
            fputs(*text == '&' ? "&amp;" : "&lt;", file);
        else
            fputc(*text, file);
    }
}

static void draw(const plot *p, const char *title) {
    fprintf(p->file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"system-ui,sans-serif\" "
            "font-size=\"13\" fill=\"#334155\">\n"
            "<style>.grid{stroke:#e2e8f0}.raw{fill:none;stroke:#93c5fd;stroke-width:1}"
            ".smooth{fill:none;stroke:#1d4ed8;stroke-width:2.5;stroke-linejoin:round}"
            ".valid{fill:#ea580c;stroke:#fff;stroke-width:1.5}.x{text-anchor:middle}.y{text-anchor:end}</style>\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
            "<text x=\"%d\" y=\"36\" font-size=\"19\" font-weight=\"600\" fill=\"#0f172a\">",
            WIDTH, HEIGHT, LEFT);
    put_escaped(p->file, title);
    fprintf(p->file, "</text>\n");
    draw_axes(p);
    draw_losses(p);
    draw_smoothed(p);
    draw_validation(p);
    draw_legend(p);
    fprintf(p->file, "</svg>\n");
}

bool metrics_draw(const metrics *m, const char *title, char error[TRAIN_ERROR]) {
    char path[sizeof m->dir + 32], growing[sizeof path + 8];
    snprintf(path, sizeof path, "%s/loss.svg", m->dir);
    snprintf(growing, sizeof growing, "%s.tmp", path);
    plot p = {.m = m, .file = system_stream(growing, "w")};
    if (!p.file) return train_fail(error, "%s: %s", growing, strerror(errno));
    find_range(&p);
    draw(&p, title);
    bool ok = !ferror(p.file);
    ok = fclose(p.file) == 0 && ok;
    ok = ok && system_rename(growing, path);
    if (ok) return true;
    train_fail(error, "%s: %s", path, strerror(errno));
    system_remove_file(growing);
    return false;
}
