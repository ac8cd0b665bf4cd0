/* SPDX-License-Identifier: MIT */
/*
 * See sampler.h. A text's tokens are in its window; those that the decoder has not seen yet follow the ones that it
 * has. So a prompt, a drawn token, the next turn of a conversation and the half of a full context that is kept are all
 * the same: tokens to append. Texts with one such token go through the model together, others one after the other.
 */
#include "train/generate/sampler.h"

#include <stdlib.h>
#include <string.h>

#include "core/arithmetic.h"
#include "text/chat.h"
#include "text/utf8.h"
#include "train/data/tokens.h"
#include "train/model/llama.h"

enum {
    USUAL_CONTEXT = 4096, /* keys and values of longer contexts may not fit memory: they must be asked for */
    PROMPT_ROWS = 512,    /* tokens of a prompt in one call: products of fewer rows are slower, more need more memory */
    MAX_ENDS = LLAMA_MAX_ENDS + 1
};

typedef struct one_text {
    int32_t *window; /* [context] */
    int64_t used;
    uint64_t drawn;
    sampler_state state;
    byte_list text;
    int64_t tokens;   /* of the answer */
    token_list shown; /* the last tokens whose text is not complete yet, and those before, which it may depend on */
    size_t shown_count;
} one_text;

struct sampler {
    vjp_device *device;
    train_model model;
    decoder *decoder;
    sampler_options options;
    one_text *text; /* [texts] */
    int64_t texts;
    int running;             /* texts that sampler_begin() started */
    size_t vocabulary;       /* tokens of the model */
    size_t drawable;         /* those that a text can have: the tokenizer's, or the bytes */
    float *logits;           /* [texts, vocabulary] */
    draw_candidate *scratch; /* [drawable] */
    model_tokenizer tokenizer;
    int32_t ends[MAX_ENDS];
    int end_count;
    int32_t message_end; /* of a conversation; -1: none */
};

/* ---- Opening ----------------------------------------------------------------------------------------- */

static bool load_weight(void *context, const char *name, const vjp_tensor *want, void *to, char error[TRAIN_ERROR]) {
    const safetensors_tensor *tensor = checkpoint_tensor(context, name);
    if (!tensor) return train_fail(error, "the checkpoint has no tensor %s", name);
    return model_read(tensor, want, to, error);
}

static void add_end(sampler *s, int64_t token) {
    if (token >= 0 && s->end_count < MAX_ENDS) s->ends[s->end_count++] = (int32_t)token;
}

static vjp_dtype dtype_for(vjp_device *device, const sampler_settings *settings, const llama_config *config) {
    if (settings->dtype >= 0) return (vjp_dtype)settings->dtype;
    const vjp_op *linear = vjp_op_find("linear");
    return vjp_supports(device, linear, VJP_FORWARD, config->dtype) == VJP_OK ? config->dtype : VJP_F32;
}

static bool build(sampler *s, const checkpoint *from, const sampler_settings *settings, char error[TRAIN_ERROR]) {
    llama_config config;
    if (!llama_config_read(from->config.root, &config, error)) return false;
    if (!model_tokenizer_of(from, &s->tokenizer, error) ||
        !model_tokenizer_fits(&s->tokenizer, from, config.vocab_size, error) ||
        !llama_require_weights(&config, from, error))
        return false;
    if (settings->context > config.max_positions)
        return train_fail(error, "a context of %lld tokens; the model was made for %lld", (long long)settings->context,
                          (long long)config.max_positions);
    llama_options options = {.batch = 1, .dtype = dtype_for(s->device, settings, &config)};
    if (!lora_of(from, &config, &options.lora, error) || !lora_suits(&options.lora, &config, error)) return false;
    options.context = settings->context ? settings->context : vjp_min(config.max_positions, USUAL_CONTEXT);
    llama_build(&s->model, &config, &options);
    s->texts = vjp_max(1, settings->texts);
    s->vocabulary = (size_t)config.vocab_size;
    s->drawable = s->tokenizer.tokens ? (size_t)tokenizer_size(s->tokenizer.tokens) : TEXT_TOKENS;
    if (s->tokenizer.tokens) {
        add_end(s, s->tokenizer.end);
        for (int i = 0; i < config.end_count; i++)
            add_end(s, config.end_tokens[i]);
    }
    char unknown[TRAIN_ERROR];
    const chat_template *chat = chat_template_of(s->tokenizer.tokens, unknown);
    s->message_end = chat ? tokenizer_find(s->tokenizer.tokens, chat->end) : -1;
    s->text = calloc((size_t)s->texts, sizeof *s->text);
    s->logits = calloc((size_t)s->texts, s->vocabulary * sizeof *s->logits);
    s->scratch = malloc(s->drawable * sizeof *s->scratch);
    bool ok = s->text && s->logits && s->scratch;
    for (int64_t i = 0; i < s->texts && ok; i++)
        ok = (s->text[i].window = calloc((size_t)options.context, sizeof *s->text[i].window)) != NULL;
    if (!ok) return train_fail(error, "there is no memory to sample the model");
    const decoder_options how = {.texts = s->texts, .rows = PROMPT_ROWS};
    s->decoder = decoder_open(s->device, &s->model, &how, load_weight, (void *)from, error);
    return s->decoder != NULL;
}

sampler *sampler_open(vjp_device *device, const checkpoint *from, const sampler_settings *settings,
                      char error[TRAIN_ERROR]) {
    sampler *s = calloc(1, sizeof *s);
    if (!s) {
        train_fail(error, "there is no memory for a sampler");
        return NULL;
    }
    s->device = device;
    if (build(s, from, settings, error)) return s;
    sampler_close(s);
    return NULL;
}

void sampler_close(sampler *s) {
    if (!s) return;
    decoder_close(s->decoder);
    model_free(&s->model);
    for (int64_t i = 0; s->text && i < s->texts; i++) {
        free(s->text[i].window);
        byte_list_free(&s->text[i].text);
        token_list_free(&s->text[i].shown);
    }
    free(s->text);
    free(s->logits);
    free(s->scratch);
    model_tokenizer_free(&s->tokenizer);
    free(s);
}

const tokenizer *sampler_tokenizer(const sampler *s) {
    return s->tokenizer.tokens;
}

/* ---- Tokens of a text -------------------------------------------------------------------------------- */

/* Adds a token to the window. When it is full, its older half is dropped, and the newer half is the context. */
static void push(sampler *s, int64_t text, int32_t token) {
    one_text *t = &s->text[text];
    if (t->used == s->model.context) {
        int64_t kept = s->model.context / 2;
        memmove(t->window, t->window + t->used - kept, (size_t)kept * sizeof *t->window);
        t->used = kept;
        decoder_clear(s->decoder, text);
    }
    t->window[t->used++] = token;
}

static bool push_prompt(sampler *s, int64_t text, const char *prompt, size_t bytes, char error[TRAIN_ERROR]) {
    const model_tokenizer *t = &s->tokenizer;
    one_text *to = &s->text[text];
    if (!t->tokens) {
        for (size_t i = 0; i < bytes; i++)
            push(s, text, (unsigned char)prompt[i]);
        if (!to->used) push(s, text, '\n');
        return true;
    }
    token_list ids = {0};
    bool ok = tokenizer_encode(t->tokens, prompt, bytes, !s->options.chat, &ids, error);
    for (size_t i = 0; i < ids.count; i++)
        if (s->options.chat || i + 1 < ids.count || ids.ids[i] != t->end) /* the text is to continue */
            push(s, text, ids.ids[i]);
    /* A text begins after the end of another one. */
    if (ok && !to->used) push(s, text, t->begin >= 0 ? t->begin : t->end >= 0 ? t->end : 0);
    token_list_free(&ids);
    return ok;
}

/* Makes a text ready for its answer. */
static bool start(sampler *s, int64_t text, const char *prompt, size_t bytes, char error[TRAIN_ERROR]) {
    one_text *t = &s->text[text];
    t->text.count = t->shown.count = t->shown_count = 0;
    t->tokens = 0;
    if (!push_prompt(s, text, prompt, bytes, error)) return false;
    /* Decoders treat the first token of a text in their own way: the last one before the new text is that. */
    int32_t last = t->window[t->used - 1];
    if (s->tokenizer.tokens && !token_list_add(&t->shown, &last, 1))
        return train_fail(error, "there is no memory to sample the model");
    t->shown_count = t->shown.count;
    t->state = SAMPLER_RUNNING;
    return true;
}

bool sampler_begin(sampler *s, const sampler_options *options, const sampler_prompt *prompts, int count,
                   char error[TRAIN_ERROR]) {
    if (count < 1 || count > s->texts)
        return train_fail(error, "%d prompts at once; the sampler has room for %lld", count, (long long)s->texts);
    s->options = *options;
    s->running = 0;
    for (int i = 0; i < count; i++) {
        decoder_clear(s->decoder, i);
        s->text[i].used = 0;
        s->text[i].drawn = 0;
        if (!start(s, i, prompts[i].text, prompts[i].bytes, error)) return false;
    }
    s->running = count;
    return true;
}

bool sampler_continue(sampler *s, int text, const char *prompt, size_t bytes, char error[TRAIN_ERROR]) {
    return start(s, text, prompt, bytes, error);
}

/* ---- Text of tokens ---------------------------------------------------------------------------------- */

/*
 * Adds the text of the tokens that are not shown yet, unless it ends inside a character: what the tokens since the last
 * time decode to, less what those among them that are shown decode to.
 */
static bool add_text(sampler *s, one_text *to, int32_t token, char error[TRAIN_ERROR]) {
    enum { MAX_WAIT = 8 }; /* tokens of one character; more are broken */
    const model_tokenizer *t = &s->tokenizer;
    if (!t->tokens) {
        char byte = (char)token;
        return byte_list_add(&to->text, &byte, 1) || train_fail(error, "there is no memory for the text");
    }
    byte_list before = {0}, now = {0};
    bool ok = token_list_add(&to->shown, &token, 1) || train_fail(error, "there is no memory for the text");
    ok = ok && tokenizer_decode(t->tokens, to->shown.ids, to->shown_count, false, &before, error) &&
         tokenizer_decode(t->tokens, to->shown.ids, to->shown.count, false, &now, error);
    bool replaced = ok && now.count >= 3 && memcmp(now.bytes + now.count - 3, "\xef\xbf\xbd", 3) == 0;
    bool whole = ok && utf8_valid(now.bytes, now.count) == now.count && !replaced;
    if (ok && (whole || to->shown.count - to->shown_count >= MAX_WAIT)) {
        if (now.count > before.count) ok = byte_list_add(&to->text, now.bytes + before.count, now.count - before.count);
        if (!ok) train_fail(error, "there is no memory for the text");
        /* The tokens that were just shown stay, for those that follow. */
        memmove(to->shown.ids, to->shown.ids + to->shown_count,
                (to->shown.count - to->shown_count) * sizeof *to->shown.ids);
        to->shown.count -= to->shown_count;
        to->shown_count = to->shown.count;
    }
    byte_list_free(&before);
    byte_list_free(&now);
    return ok;
}

/* Ends the text before a stop string that begins at `from` or later. */
static void find_stop(const sampler *s, one_text *t, size_t from) {
    for (size_t at = from; at < t->text.count && t->state == SAMPLER_RUNNING; at++)
        for (int i = 0; i < s->options.stops; i++) {
            size_t length = strlen(s->options.stop[i]);
            if (!length || length > t->text.count - at || memcmp(t->text.bytes + at, s->options.stop[i], length) != 0)
                continue;
            t->text.count = at;
            t->state = SAMPLER_STOP;
            break;
        }
}

static size_t longest_stop(const sampler *s) {
    size_t longest = 0;
    for (int i = 0; i < s->options.stops; i++)
        if (strlen(s->options.stop[i]) > longest) longest = strlen(s->options.stop[i]);
    return longest;
}

/* Bytes at the end of a text that are the beginning of a character. */
static size_t open_character(const char *text, size_t count) {
    for (size_t back = 1; back <= 3 && back <= count; back++) {
        unsigned char first = (unsigned char)text[count - back];
        if ((first & 0xc0) == 0x80) continue;
        return first >= 0xc2 && first <= 0xf4 && utf8_length((char)first) > back ? back : 0;
    }
    return 0;
}

sampler_answer sampler_answer_of(const sampler *s, int text) {
    const one_text *t = &s->text[text];
    sampler_answer a = {t->state, t->text.bytes, t->text.count, t->text.count, t->tokens};
    if (t->state != SAMPLER_RUNNING) return a;
    a.ready -= open_character(a.bytes, a.count);
    for (int i = 0; i < s->options.stops; i++)
        for (size_t length = strlen(s->options.stop[i]); length > 1; length--) {
            size_t part = length - 1; /* of the stop string, at the end of the text */
            if (part > a.count || memcmp(a.bytes + a.count - part, s->options.stop[i], part) != 0) continue;
            if (a.count - part < a.ready) a.ready = a.count - part;
            break;
        }
    return a;
}

/* ---- Drawing ----------------------------------------------------------------------------------------- */

static bool is_end(const sampler *s, int32_t token) {
    for (int i = 0; i < s->end_count; i++)
        if (s->ends[i] == token) return true;
    return s->options.chat && token == s->message_end;
}

static bool take_token(sampler *s, int64_t text, float *logits, char error[TRAIN_ERROR]) {
    one_text *t = &s->text[text];
    const sampler_options *o = &s->options;
    draw_penalize(logits, (int)s->drawable, t->window, t->used, o->draw.repetition, s->scratch);
    /* The model may have more tokens than a text can have. */
    int token = draw_token(logits, (int)s->drawable, &o->draw, t->drawn++, s->scratch);
    if (token < 0) return train_fail(error, "the model's prediction is not a number; its training may have diverged");
    t->tokens++;
    if (is_end(s, token)) {
        t->state = SAMPLER_END;
        return true;
    }
    push(s, text, token);
    size_t before = t->text.count, longest = longest_stop(s);
    if (!add_text(s, t, token, error)) return false;
    find_stop(s, t, before >= longest ? before - longest : 0);
    bool tokens_end = o->max_tokens && t->tokens >= o->max_tokens;
    /* Tokens without text, which a model may draw for ever, count as one byte. */
    bool bytes_end = o->max_bytes && ((int64_t)t->text.count >= o->max_bytes || t->tokens >= o->max_bytes);
    if (t->state == SAMPLER_RUNNING && (tokens_end || bytes_end)) t->state = SAMPLER_LIMIT;
    return true;
}

bool sampler_next(sampler *s, char error[TRAIN_ERROR]) {
    int64_t texts[SAMPLER_MAX_TEXTS], count = 0;
    int32_t tokens[SAMPLER_MAX_TEXTS];
    for (int64_t i = 0; i < s->running; i++) {
        one_text *t = &s->text[i];
        if (t->state != SAMPLER_RUNNING) continue;
        int64_t seen = decoder_length(s->decoder, i);
        if (t->used - seen == 1) {
            tokens[count] = t->window[seen];
            texts[count++] = i;
            continue;
        }
        if (!decoder_append(s->decoder, i, t->window + seen, t->used - seen, s->logits, error) ||
            !take_token(s, i, s->logits, error))
            return false;
    }
    if (!count) return true;
    if (!decoder_step(s->decoder, texts, tokens, count, s->logits, error)) return false;
    for (int64_t i = 0; i < count; i++)
        if (!take_token(s, texts[i], s->logits + (size_t)i * s->vocabulary, error)) return false;
    return true;
}
