/* SPDX-License-Identifier: MIT */
/* How a conversation is written for a model that was trained on conversations: the templates of Llama 3 and ChatML. */
#ifndef VJP_TEXT_CHAT_H
#define VJP_TEXT_CHAT_H

#include "text/tokenizer.h"

typedef struct chat_template {
    const char *name;
    const char *begin;                /* before the first message */
    const char *before_role, *before; /* a message: before_role ROLE before TEXT after */
    const char *after;
    const char *end; /* the token that ends a message */
} chat_template;

/* The template whose tokens the tokenizer has; NULL: none, and `error` says so. */
const chat_template *chat_template_of(const tokenizer *t, char error[FILE_ERROR]);

/* Adds a message, without the blanks around its text, as the templates do. False, here and below: no memory. */
bool chat_add_message(const chat_template *chat, const char *role, const char *text, byte_list *to);

/* Adds what the model's answer follows. */
bool chat_add_answer(const chat_template *chat, byte_list *to);

#endif
