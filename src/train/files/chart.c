/* SPDX-License-Identifier: MIT */
/* Curves over the steps of a run; see chart.h. */
#include "train/files/chart.h"

#include <math.h>
#include <string.h>

/* Blues and oranges that differ in brightness, too, and stay readable on white and on near-black. */
static const char STYLES[] =
    "text{fill:#334155}.title{fill:#0f172a;font-size:19px;font-weight:600}.back{fill:#fff}"
    ".grid{stroke:#e2e8f0}.x{text-anchor:middle}.y{text-anchor:end}"
    "path{fill:none;stroke-linejoin:round}.raw{stroke:#93c5fd;stroke-width:1}"
    ".smooth{stroke:#1d4ed8;stroke-width:2.5}.rate,.norm{stroke:#64748b;stroke-width:1.5}"
    "path.valid{stroke:#ea580c;stroke-width:2}circle{stroke:#fff;stroke-width:1.5}circle.valid{fill:#ea580c}";
static const char DARK_STYLES[] =
    "text{fill:#cbd5e1}.title{fill:#f1f5f9}.back{fill:#0f172a}.grid{stroke:#293548}.raw{stroke:#33568f}"
    ".smooth{stroke:#7db2ff}.rate,.norm{stroke:#94a3b8}path.valid{stroke:#fb923c}"
    "circle{stroke:#0f172a}circle.valid{fill:#fb923c}";
static const char *const colours[2][CHART_COLOURS] = {
    {"#1d4ed8", "#ea580c", "#15803d", "#a21caf", "#0e7490", "#b91c1c", "#a16207", "#475569"},
    {"#7db2ff", "#fb923c", "#4ade80", "#e879f9", "#22d3ee", "#f87171", "#facc15", "#cbd5e1"}};

static void put_escaped(FILE *file, const char *text) {
    for (; *text; text++) {
        if (*text == '&' || *text == '<')
            fputs(*text == '&' ? "&amp;" : "&lt;", file);
        else if ((unsigned char)*text < ' ') /* no XML can hold the others */
            fputc(' ', file);
        else
            fputc(*text, file);
    }
}

static void put_colours(FILE *file, int dark) {
    for (int i = 0; i < CHART_COLOURS; i++)
        fprintf(file, "path.run%d{stroke:%s%s}circle.run%d{fill:%s}", i, colours[dark][i],
                dark ? "" : ";stroke-width:2", i, colours[dark][i]);
}

void chart_begin(chart *c, FILE *file, int height, const char *title) {
    c->file = file;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"system-ui,sans-serif\" "
            "font-size=\"13\">\n<style>%s",
            CHART_WIDTH, height, STYLES);
    put_colours(file, 0);
    fprintf(file, "@media(prefers-color-scheme:dark){%s", DARK_STYLES);
    put_colours(file, 1);
    fprintf(file,
            "}</style>\n<rect width=\"100%%\" height=\"100%%\" class=\"back\"/>\n"
            "<text x=\"%d\" y=\"36\" class=\"title\">",
            CHART_LEFT);
    put_escaped(file, title);
    fputs("</text>\n", file);
}

void chart_end(const chart *c) {
    fputs("</svg>\n", c->file);
}

/* ---- Scales ------------------------------------------------------------------------------------------ */

static double value_of(const metrics_row *row, chart_value value) {
    switch (value) {
    case CHART_LOSS: return row->loss;
    case CHART_SMOOTHED: return row->smoothed;
    case CHART_VALIDATION: return row->validation;
    case CHART_RATE: return row->rate;
    case CHART_NORM: return row->norm;
    }
    return (double)NAN;
}

static double x_of(const chart *c, int64_t step) {
    double span = c->last > c->first ? (double)(c->last - c->first) : 1;
    return CHART_LEFT + (CHART_WIDTH - CHART_LEFT - CHART_RIGHT) * (double)(step - c->first) / span;
}

static double y_of(const chart_panel *p, double value) {
    double y = p->top + p->height * (p->high - value) / (p->high - p->low);
    return fmin(fmax(y, p->top), p->top + p->height);
}

/* 1, 2 or 5 times a power of ten, so that about `count` of them fit into the range. */
static double tick(double range, int count) {
    double rough = range / count, power = pow(10, floor(log10(rough))), part = rough / power;
    return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
}

void chart_widen(chart_rows rows, chart_value value, double *low, double *high) {
    for (size_t i = 0; i < rows.count; i++) {
        *low = fmin(*low, value_of(&rows.row[i], value));
        *high = fmax(*high, value_of(&rows.row[i], value));
    }
}

chart_panel chart_add_panel(const chart *c, double top, double height, double low, double high, int lines,
                            const char *label) {
    if (!(high >= low)) low = 0, high = 1;
    if (high == low) {
        high += low != 0 ? fabs(low) / 2 : 0.5;
        low -= low != 0 ? fabs(low) / 2 : 0.5;
    }
    chart_panel p = {.chart = c, .top = top, .height = height, .step = tick(high - low, lines)};
    p.low = floor(low / p.step) * p.step;
    p.high = ceil(high / p.step) * p.step;
    for (int i = 0; p.low + i * p.step <= p.high + p.step / 2; i++) {
        double value = p.low + i * p.step, y = y_of(&p, value);
        fprintf(c->file, "<path d=\"M%d,%.1f H%d\" class=\"grid\"/><text x=\"%d\" y=\"%.1f\" class=\"y\">%.6g</text>\n",
                CHART_LEFT, y, CHART_WIDTH - CHART_RIGHT, CHART_LEFT - 10, y + 4, fabs(value) < p.step / 2 ? 0 : value);
    }
    fprintf(c->file, "<text transform=\"translate(20,%.1f) rotate(-90)\" class=\"x\">%s</text>\n", top + height / 2,
            label);
    return p;
}

void chart_steps(const chart *c, double bottom) {
    double every = fmax(1, tick((double)(c->last - c->first) + 1, 8));
    for (double at = ceil((double)c->first / every) * every; at <= (double)c->last; at += every)
        fprintf(c->file, "<text x=\"%.1f\" y=\"%.1f\" class=\"x\">%.0f</text>\n", x_of(c, (int64_t)at), bottom + 22,
                at);
    fprintf(c->file, "<text x=\"%d\" y=\"%.1f\" class=\"x\">step</text>\n",
            (CHART_LEFT + CHART_WIDTH - CHART_RIGHT) / 2, bottom + 42);
}

/* ---- Curves ------------------------------------------------------------------------------------------ */

void chart_line(const chart_panel *p, chart_rows rows, chart_value value, const char *style) {
    const metrics_row *last = NULL; /* the one that ends the curve is always drawn */
    for (size_t i = 0; i < rows.count; i++)
        if (!isnan(value_of(&rows.row[i], value))) last = &rows.row[i];
    if (!last) return;
    fprintf(p->chart->file, "<path class=\"%s\" d=\"", style);
    double drawn = -1;
    for (const metrics_row *row = rows.row; row <= last; row++) {
        double x = x_of(p->chart, row->step), own = value_of(row, value);
        if (isnan(own) || (x < drawn + 1 && row != last)) continue;
        fprintf(p->chart->file, "%c%.1f,%.1f", drawn < 0 ? 'M' : 'L', x, y_of(p, own));
        drawn = x;
    }
    fputs("\"/>\n", p->chart->file);
}

/* For each half pixel, a line from its lowest to its highest value. */
void chart_band(const chart_panel *p, chart_rows rows, chart_value value, const char *style) {
    if (!rows.count) return;
    fprintf(p->chart->file, "<path class=\"%s\" d=\"", style);
    char command = 'M';
    for (size_t i = 0; i < rows.count;) {
        double low = INFINITY, high = -INFINITY, x = floor(x_of(p->chart, rows.row[i].step) * 2) / 2, at = x;
        size_t begin = i;
        for (; i < rows.count && (i == begin || x_of(p->chart, rows.row[i].step) < x + 0.5); i++) {
            low = fmin(low, value_of(&rows.row[i], value));
            high = fmax(high, value_of(&rows.row[i], value));
            at = x_of(p->chart, rows.row[i].step);
        }
        fprintf(p->chart->file, "%c%.1f,%.1f", command, at, y_of(p, low));
        if (high > low) fprintf(p->chart->file, "V%.1f", y_of(p, high));
        command = 'L';
    }
    fputs("\"/>\n", p->chart->file);
}

void chart_dots(const chart_panel *p, chart_rows rows, chart_value value, const char *style) {
    double drawn = -1;
    for (size_t i = 0; i < rows.count; i++) {
        double own = value_of(&rows.row[i], value), x = x_of(p->chart, rows.row[i].step);
        if (isnan(own) || x < drawn + 2) continue; /* dots that hide each other */
        drawn = x;
        fprintf(p->chart->file,
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" class=\"%s\"><title>step %lld: %.4f</title></circle>\n", x,
                y_of(p, own), style, (long long)rows.row[i].step, own);
    }
}

double chart_legend(const chart *c, double x, double y, const char *style, bool dot, const char *text) {
    fprintf(c->file, "<path d=\"M%.1f,%.1f h22\" class=\"%s\"/>", x, y, style);
    if (dot) fprintf(c->file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" class=\"%s\"/>", x + 11, y, style);
    fprintf(c->file, "<text x=\"%.1f\" y=\"%.1f\">", x + 28, y + 4);
    put_escaped(c->file, text);
    fputs("</text>\n", c->file);
    return x + 52 + 7 * (double)strlen(text);
}
