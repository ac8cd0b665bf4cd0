/* SPDX-License-Identifier: MIT */
/*
 * What the program prints on stdout: JSON lines, and tables for people. Colour is for terminals only, and nothing is
 * shown by colour alone. A line that cannot be written ends the program, so that no result is silently incomplete.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "comm/group.h"
#include "core/real.h"
#include "core/system.h"
#include "files/json.h"
#include "proof/text.h"

static bool deferred;
static int write_error; /* the first one */

void cli_flush(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    int reason = errno ? errno : EIO;
    if (!write_error) write_error = reason;
    if (deferred) return;
    /* For a closed pipe, as in `vjp ops | head`, nothing is printed: the reader closed it. */
    if (reason != EPIPE) fprintf(stderr, "vjp: standard output cannot be written: %s\n", strerror(reason));
    _Exit(CLI_FAILURE);
}

void cli_defer_write_errors(void) {
    deferred = true;
    system_discard_closed_output();
}

int cli_write_error(void) {
    return write_error;
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

/* Whether the next element on stdout needs a comma before it. */
static bool needs_comma;

/* Bytes that are not UTF-8, which a model may produce, become U+FFFD: JSON strings cannot hold them. */
static void write_string(const char *text) {
    size_t length = strlen(text), bytes;
    putchar('"');
    for (const char *c = text; *c; c += bytes ? bytes : 1) {
        bytes = json_character(c, length - (size_t)(c - text));
        if (*c == '"' || *c == '\\')
            printf("\\%c", *c);
        else if (*c == '\n')
            fputs("\\n", stdout);
        else if (*c == '\t')
            fputs("\\t", stdout);
        else if (!bytes)
            fputs("\\ufffd", stdout);
        else if (bytes == 1 && (*c < 0x20 || *c == 0x7f))
            printf("\\u%04x", (unsigned)*c);
        else
            fwrite(c, 1, bytes, stdout);
    }
    putchar('"');
}

static void write_key(const char *key) {
    if (needs_comma) fputs(", ", stdout);
    needs_comma = true;
    if (!key) return;
    write_string(key);
    fputs(": ", stdout);
}

static void open_with(const char *key, char bracket) {
    write_key(key);
    putchar(bracket);
    needs_comma = false;
}

static void close_with(char bracket) {
    putchar(bracket);
    needs_comma = true;
}

void cli_json_begin(void) {
    needs_comma = false;
    putchar('{');
}

void cli_json_end(void) {
    needs_comma = false;
    fputs("}\n", stdout);
    cli_flush();
}

void cli_json_null(const char *key) {
    write_key(key);
    fputs("null", stdout);
}

void cli_json_text(const char *key, const char *value) {
    write_key(key);
    if (value)
        write_string(value);
    else
        fputs("null", stdout);
}

void cli_json_real(const char *key, double value) {
    char text[TEXT_VALUE];
    if (isnan(value))
        cli_json_text(key, "NaN");
    else if (isinf(value))
        cli_json_text(key, value > 0 ? "Infinity" : "-Infinity");
    else {
        write_key(key);
        fputs(text_real(value, text), stdout);
    }
}

void cli_json_integer(const char *key, int64_t value) {
    write_key(key);
    printf("%" PRId64, value);
}

void cli_json_boolean(const char *key, bool value) {
    write_key(key);
    fputs(value ? "true" : "false", stdout);
}

void cli_json_shape(const char *key, int ndim, const int64_t *shape) {
    cli_json_array(key);
    for (int i = 0; i < ndim; i++)
        cli_json_integer(NULL, shape[i]);
    cli_json_array_end();
}

void cli_json_object(const char *key) {
    open_with(key, '{');
}

void cli_json_object_end(void) {
    close_with('}');
}

void cli_json_array(const char *key) {
    open_with(key, '[');
}

void cli_json_array_end(void) {
    close_with(']');
}

/* ---- Tables ------------------------------------------------------------------------------------------ */

/* Open MPI gives its processes a terminal whose text goes to mpirun's output. */
bool cli_is_terminal(void) {
    return system_output_is_terminal() && !vjp_group_launcher();
}

const char *cli_paint(cli_colour colour) {
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    if (!cli_is_terminal() || (no_color && *no_color) || (term && strcmp(term, "dumb") == 0)) return "";
    switch (colour) {
    case CLI_PLAIN: return "\033[0m";
    case CLI_BOLD: return "\033[1m";
    case CLI_DIM: return "\033[2m";
    case CLI_GREEN: return "\033[32m";
    case CLI_YELLOW: return "\033[33m";
    case CLI_RED: return "\033[31m";
    case CLI_BLUE: return "\033[34m";
    }
    return "";
}

int cli_width(const char *text) {
    int width = 0;
    for (; text && *text; text++)
        width += (*text & 0xc0) != 0x80; /* the other bytes continue a UTF-8 character */
    return width;
}

void cli_fit(cli_column *columns, int count, const cli_cell *cells) {
    for (int i = 0; i < count; i++) {
        int cell = cli_width(cells[i].text), title = cli_width(columns[i].title);
        if (columns[i].width < cell) columns[i].width = cell;
        if (columns[i].width < title) columns[i].width = title;
    }
}

static void print_cells(const cli_column *columns, int count, const cli_cell *cells) {
    int last = count - 1; /* the last cell that has text: no blanks follow it */
    while (last > 0 && !cli_width(cells[last].text))
        last--;
    for (int i = 0; i <= last; i++) {
        int width = columns[i].width > cli_width(columns[i].title) ? columns[i].width : cli_width(columns[i].title);
        int blanks = width - cli_width(cells[i].text);
        if (blanks < 0) blanks = 0;
        bool painted = cells[i].colour != CLI_PLAIN;
        printf("%s%*s%s%s%s", i ? "  " : "", columns[i].right ? blanks : 0, "",
               painted ? cli_paint(cells[i].colour) : "", cells[i].text ? cells[i].text : "",
               painted ? cli_paint(CLI_PLAIN) : "");
        if (!columns[i].right && i < last) printf("%*s", blanks, "");
    }
    putchar('\n');
    cli_flush();
}

void cli_head(const cli_column *columns, int count) {
    enum { MAX_COLUMNS = 32 };
    cli_cell titles[MAX_COLUMNS];
    for (int i = 0; i < count && i < MAX_COLUMNS; i++)
        titles[i] = (cli_cell){columns[i].title, CLI_BOLD};
    print_cells(columns, count < MAX_COLUMNS ? count : MAX_COLUMNS, titles);
}

void cli_row(const cli_column *columns, int count, const cli_cell *cells) {
    print_cells(columns, count, cells);
}

const char *cli_number(double value, int digits, char text[CLI_NUMBER_TEXT]) {
    snprintf(text, CLI_NUMBER_TEXT, "%.*g", digits, isnan(value) ? (double)NAN : value);
    return text;
}

const char *cli_bytes(double bytes, char text[CLI_BYTES_TEXT]) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 4)
        bytes /= 1024, unit++;
    /* Whole numbers, as sizes of caches and memories mostly are, have no decimal point. */
    snprintf(text, CLI_BYTES_TEXT, bytes == floor(bytes) || bytes >= 100 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return text;
}
