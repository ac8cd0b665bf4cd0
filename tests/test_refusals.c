/* SPDX-License-Identifier: MIT */
/*
 * What is refused, as a table: a valid call (sample.h), one edit that makes it invalid, the status, and words that the
 * sentence must have. Every row runs on cpu and ref; the valid call must pass there, so that the edit alone is refused,
 * and after the refusal every byte of every tensor and of the guards between them must be unchanged.
 *
 * Edits, several separated by spaces:
 *   @eps=-1             an attribute
 *   x=absent            no tensor
 *   x.shape=[2,3]       shape (and rank); x.ndim=9 the rank alone
 *   x.stride=[3,1]      strides
 *   x.dtype=i32         a name or a number
 *   x.data=NULL         x.offset=1  x.flags=2
 *   y.at=x+4            y's memory begins 4 bytes into x's (y.at=x: at the same place)
 *   index[3]=-1         an element's value
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attributes.h"
#include "sample.h"

enum { MAX_WORDS = 4 };

typedef struct refusal {
    const char *op;
    vjp_pass pass;
    const char *edit;
    vjp_status status;
    const char *words[MAX_WORDS];
} refusal;

#define F VJP_FORWARD
#define B VJP_BACKWARD

static const refusal rows[] = {
    /* ---- rules for any tensor, the same for every op ---- */
    {"layer_norm", F, "x=absent", VJP_INVALID, {"x", "missing"}},
    {"layer_norm", B, "dy=absent", VJP_INVALID, {"dy", "missing"}},
    {"rms_norm", B, "x=absent", VJP_INVALID, {"x", "missing"}},
    {"rope", F, "cosine=absent", VJP_INVALID, {"cosine", "missing"}},
    {"rope", B, "sine=absent", VJP_INVALID, {"sine", "missing"}},
    {"cumsum", B, "dy=absent", VJP_INVALID, {"dy", "missing"}},
    {"gather", F, "index=absent", VJP_INVALID, {"index", "missing"}},
    {"gather", B, "index=absent", VJP_INVALID, {"index", "missing"}},
    {"linear", F, "b=absent", VJP_INVALID, {"b ", "missing"}},
    {"linear", B, "a=absent", VJP_INVALID, {"a is missing", "db needs it"}},
    {"linear", B, "a=absent db=absent pre=absent", VJP_INVALID, {"a and pre are both missing", "derivative"}},
    {"linear", B, "a=absent db=absent dy.shape=[9] pre.shape=[9]", VJP_INVALID, {"dy has rank 1", "[..., M, N]"}},
    {"linear", B, "a=absent db=absent da.shape=[2,5,8]", VJP_INVALID, {"da", "[2, 5, 8]", "[2, 5, 7]"}},
    {"linear", B, "a=absent db=absent dy.shape=[2,5,8]", VJP_INVALID, {"dy", "[2, 5, 8]", "[2, 5, 9]"}},
    {"group_norm", B, "dy=absent", VJP_INVALID, {"dy", "missing"}},
    {"maxpool2d", B, "x=absent argmax=absent", VJP_INVALID, {"x", "argmax", "missing"}},
    {"conv2d", F, "weight=absent", VJP_INVALID, {"weight", "missing"}},
    {"conv2d", B, "x=absent", VJP_INVALID, {"x is missing", "dweight needs it"}},
    {"conv2d", B, "weight=absent", VJP_INVALID, {"weight is missing", "dx needs it"}},
    {"conv2d", B, "weight=absent dweight=absent dx=absent", VJP_INVALID, {"weight and dweight", "kernel's size"}},
    {"conv2d", B, "x=absent dweight=absent dx=absent", VJP_INVALID, {"0 x 0", "without x and dx"}},
    {"cumsum", F, "x.dtype=6", VJP_INVALID, {"x", "6"}},
    {"cumsum", F, "x.dtype=-1", VJP_INVALID, {"x", "-1"}},
    {"cumsum", F, "x.ndim=9", VJP_INVALID, {"x", "rank 9", "8"}},
    {"cumsum", F, "x.ndim=-1", VJP_INVALID, {"x", "rank -1"}},
    {"cumsum", F, "x.shape=[2,-17,3]", VJP_INVALID, {"x", "-17", "axis 1"}},
    {"cumsum", F, "x.shape=[1099511627776,1099511627776,3]", VJP_INVALID, {"x", "overflows"}},
    {"cumsum", F, "x.shape=[9223372036854775807]", VJP_INVALID, {"x", "overflows"}},
    {"cumsum", F, "x.shape=[0,9223372036854775807,9223372036854775807]", VJP_INVALID, {"x", "overflows"}},
    {"layer_norm", F, "x.shape=[4611686018427387904,2,65]", VJP_INVALID, {"x", "overflows"}},
    {"rms_norm", B, "dx.shape=[2147483648,2147483648,65]", VJP_INVALID, {"dx", "overflows"}},
    {"linear",
     F,
     "y=absent pre=absent bias=absent a.shape=[2147483648,0] b.shape=[0,1099511627776]",
     VJP_INVALID,
     {"y", "overflows"}},
    {"gather",
     F,
     "y=absent table.shape=[1099511627776,0] index.shape=[1099511627776] index.data=NULL",
     VJP_INVALID,
     {"y", "overflows"}},
    {"gather", B, "dtable=absent @rows=9223372036854775807", VJP_INVALID, {"table", "overflows"}},
    {"cumsum", F, "x.stride=[51,1,17]", VJP_UNSUPPORTED, {"x", "packed"}},
    {"layer_norm", B, "dx.stride=[195,65,2]", VJP_UNSUPPORTED, {"dx", "packed"}},
    {"linear", F, "b.stride=[1,7]", VJP_UNSUPPORTED, {"b ", "packed"}},
    {"cumsum", F, "x.stride=[0,3,1]", VJP_UNSUPPORTED, {"x", "packed"}},
    {"cumsum", F, "x.stride=[0,0,0]", VJP_UNSUPPORTED, {"x of shape [2, 17, 3] has strides [0, 0, 0]", "packed"}},
    {"rms_norm", B, "dgamma.stride=[0]", VJP_UNSUPPORTED, {"dgamma", "strides [0]"}},
    {"cumsum", F, "x.reserved=1", VJP_INVALID, {"x", "reserved"}},
    {"maxpool2d", F, "x.stride=[189,63,-9,1]", VJP_UNSUPPORTED, {"x", "packed"}},
    {"cumsum", F, "y.flags=2", VJP_INVALID, {"y", "flags", "0x2"}},
    {"cumsum", F, "x.flags=1", VJP_INVALID, {"x", "accumulate", "input"}},
    {"layer_norm", F, "mean.flags=1", VJP_INVALID, {"mean", "accumulate"}},
    {"maxpool2d", F, "argmax.flags=1", VJP_INVALID, {"argmax", "accumulate"}},
    {"linear", F, "pre.flags=1", VJP_INVALID, {"pre", "accumulate"}},
    {"cumsum", F, "x.data=NULL", VJP_INVALID, {"x", "NULL"}},
    {"rope", B, "positions.data=NULL", VJP_INVALID, {"positions", "NULL"}},
    {"layer_norm", B, "dgamma.data=NULL", VJP_INVALID, {"dgamma", "NULL"}},
    {"cumsum", F, "x.offset=2", VJP_INVALID, {"x", "+ 2", "4-byte"}},
    {"cumsum", B, "dx.offset=1", VJP_INVALID, {"dx", "+ 1", "aligned"}},
    {"cumsum", F, "x.offset=18446744073709551552", VJP_INVALID, {"x", "past the end of memory"}},

    /* ---- rows that lie apart ---- */
    {"attention", F, "q.stride=[55,11,3,1]", VJP_UNSUPPORTED, {"q of shape [2, 5, 4, 3] has strides [55, 11, 3, 1]"}},
    {"attention", F, "q.stride=[101,20,3,1]", VJP_UNSUPPORTED, {"q", "strides"}},
    {"attention", F, "q.stride=[0,20,3,1]", VJP_UNSUPPORTED, {"q", "strides"}},
    {"attention", F, "k.stride=[140,20,4,1]", VJP_UNSUPPORTED, {"k", "strides"}},
    {"attention", F, "k.stride=[140,20,6,2]", VJP_UNSUPPORTED, {"k", "strides"}},
    {"attention", F, "v.stride=[-140,-20,3,1]", VJP_UNSUPPORTED, {"v", "strides"}},
    {"attention", F, "y.stride=[100,20,3,1]", VJP_UNSUPPORTED, {"y", "strides"}},
    {"attention", B, "dy.stride=[100,20,3,1]", VJP_UNSUPPORTED, {"dy", "strides"}},
    {"attention", B, "lse.stride=[24,6,1]", VJP_UNSUPPORTED, {"lse", "strides"}},
    {"cumsum", F, "x.stride=[60,3,1]", VJP_UNSUPPORTED, {"x", "strides"}},
    {"attention", F, "q.stride=[360287970189639680,72057594037927936,3,1]", VJP_UNSUPPORTED, {"q", "strides"}},
    {"attention", F, "q.stride=[-1,-9223372036854775807,3,1]", VJP_UNSUPPORTED, {"q", "strides"}},
    {"attention",
     F,
     "q.stride=[175921860444160,35184372088832,3,1] q.offset=18446462598732840960",
     VJP_INVALID,
     {"q", "past the end of memory"}},
    {"attention",
     B,
     "dq.stride=[100,20,3,1] dk.stride=[140,20,3,1] dk.at=dq+44",
     VJP_INVALID,
     {"dq overlaps dk", "may not share"}},
    {"attention", B, "dq.stride=[100,20,3,1] dk.stride=[140,20,3,1] dk.at=dq+60", VJP_INVALID, {"dq overlaps dk"}},
    {"attention", B, "dq.stride=[100,20,3,1] dk.stride=[147,21,3,1] dk.at=dq+48", VJP_INVALID, {"dq overlaps dk"}},
    {"attention", B, "dq.stride=[100,20,3,1] dk.at=dq+48", VJP_INVALID, {"dq overlaps dk"}},
    {"attention",
     B,
     "dk.at=first dk.stride=[91,13,3,1] v.at=dk+20 v.stride=[91,13,3,1]",
     VJP_INVALID,
     {"dk overlaps v"}},
    {"rope", F, "y.stride=[160,32,8,1] y.at=x", VJP_INVALID, {"y overlaps x", "exactly the same memory"}},
    {"rope", F, "y.stride=[160,32,8,1] x.stride=[155,31,8,1] y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"rope", F, "y.stride=[160,32,8,1] x.stride=[160,32,8,1] y.at=x+4", VJP_INVALID, {"y overlaps x"}},
    {"rope", F, "y.stride=[160,32,8,1] x.stride=[160,32,8,1] y.at=x y.flags=1", VJP_INVALID, {"y overlaps x", "accum"}},

    /* ---- dtypes ---- */
    {"cumsum", F, "y.dtype=bf16", VJP_INVALID, {"y is bf16", "f32"}},
    {"cumsum", B, "dx.dtype=f64", VJP_INVALID, {"dx is f64", "f32"}},
    {"cumsum", F, "x.dtype=i32 y.dtype=i32", VJP_INVALID, {"x is i32"}},
    {"cumsum", F, "x.dtype=i64 y.dtype=i64 x.shape=[2,4,3] y.shape=[2,4,3]", VJP_INVALID, {"x is i64"}},
    {"layer_norm", F, "gamma.dtype=bf16", VJP_INVALID, {"gamma is bf16", "f32"}},
    {"layer_norm", F, "x.dtype=bf16 y.dtype=bf16 gamma.dtype=f16", VJP_INVALID, {"gamma is f16", "bf16 or f32"}},
    {"layer_norm", F, "x.dtype=bf16 y.dtype=bf16 mean.dtype=bf16", VJP_INVALID, {"mean is bf16", "f32"}},
    {"layer_norm", B, "rstd.dtype=f16", VJP_INVALID, {"rstd is f16", "f32"}},
    {"rms_norm", B, "dgamma.dtype=i32", VJP_INVALID, {"dgamma is i32"}},
    {"group_norm", B, "dy.dtype=f16", VJP_INVALID, {"f16", "f32"}},
    {"rope", F, "positions.dtype=f16", VJP_INVALID, {"positions is f16", "i32, i64 or f32"}},
    {"rope", F, "cosine.dtype=i32", VJP_INVALID, {"cosine is i32"}},
    {"gather", F, "index.dtype=bf16", VJP_INVALID, {"index is bf16", "i32, i64 or f32"}},
    {"gather", B, "index.dtype=f64", VJP_INVALID, {"index is f64"}},
    {"maxpool2d", F, "argmax.dtype=f32", VJP_INVALID, {"argmax is f32", "i32 or i64"}},
    {"linear", F, "b.dtype=bf16", VJP_INVALID, {"b is bf16", "f32"}},
    {"linear", F, "residual.dtype=bf16", VJP_INVALID, {"residual is bf16", "f32"}},
    {"linear", B, "db.dtype=f16", VJP_INVALID, {"db is f16"}},

    /* ---- ranks and sizes ---- */
    {"layer_norm", F, "x.shape=[]", VJP_INVALID, {"axes is 1", "rank 0"}},
    {"layer_norm", F, "gamma.shape=[64]", VJP_INVALID, {"gamma", "[64]", "[65]"}},
    {"layer_norm", F, "beta.shape=[1,65]", VJP_INVALID, {"beta", "[1, 65]", "[65]"}},
    {"layer_norm", F, "y.shape=[2,3,64]", VJP_INVALID, {"y", "[2, 3, 64]", "[2, 3, 65]"}},
    {"layer_norm", F, "mean.shape=[6]", VJP_INVALID, {"mean", "[6]", "[2, 3]"}},
    {"layer_norm", B, "dy.shape=[3,2,65]", VJP_INVALID, {"dy", "[3, 2, 65]", "[2, 3, 65]"}},
    {"layer_norm", B, "dgamma.shape=[66]", VJP_INVALID, {"dgamma", "[66]", "[65]"}},
    {"layer_norm", B, "rstd.shape=[2,4]", VJP_INVALID, {"rstd", "[2, 4]", "[2, 3]"}},
    {"layer_norm",
     F,
     "x.shape=[2,3,0] y=absent gamma=absent beta=absent mean=absent rstd=absent",
     VJP_INVALID,
     {"x", "[2, 3, 0]", "no element"}},
    {"rms_norm", F, "gamma.shape=[3,65]", VJP_INVALID, {"gamma", "[3, 65]", "[65]"}},
    {"rms_norm", F, "rstd.shape=[2,3,1]", VJP_INVALID, {"rstd", "[2, 3, 1]", "[2, 3]"}},
    {"rms_norm", B, "dbeta.shape=[1]", VJP_INVALID, {"dbeta", "[1]", "[65]"}},
    {"rms_norm", B, "rstd.shape=[3,2]", VJP_INVALID, {"rstd", "[3, 2]", "[2, 3]"}},
    {"group_norm", F, "x.shape=[6]", VJP_INVALID, {"x", "rank 1", "2 or more"}},
    {"group_norm", F, "gamma.shape=[2]", VJP_INVALID, {"gamma", "[2]", "[6]"}},
    {"group_norm", F, "mean.shape=[2,6]", VJP_INVALID, {"mean", "[2, 6]", "[2, 2]"}},
    {"group_norm", B, "dbeta.shape=[5]", VJP_INVALID, {"dbeta", "[5]", "[6]"}},
    {"group_norm", F, "x.shape=[2,6,0,5]", VJP_INVALID, {"x", "[2, 6, 0, 5]", "no element"}},
    {"rope", F, "x.shape=[5,8]", VJP_INVALID, {"x", "rank 2", "3 or more"}},
    {"rope", F, "cosine.shape=[21]", VJP_INVALID, {"cosine", "rank 1"}},
    {"rope", F, "sine.shape=[7,4]", VJP_INVALID, {"sine", "[7, 4]", "[7, 3]"}},
    {"rope", F, "cosine.shape=[7,2]", VJP_INVALID, {"cosine", "[7, 2]", "[7, 3]"}},
    {"rope", F, "positions.shape=[4]", VJP_INVALID, {"positions", "[4]", "[5]"}},
    {"rope", F, "positions.shape=[1,5]", VJP_INVALID, {"positions", "[1, 5]", "[2, 5]"}},
    {"rope", B, "dx.shape=[2,5,3,7]", VJP_INVALID, {"dx", "[2, 5, 3, 7]"}},
    {"cumsum", F, "y.shape=[2,17]", VJP_INVALID, {"y", "[2, 17]", "[2, 17, 3]"}},
    {"cumsum", F, "x.shape=[] y.shape=[]", VJP_INVALID, {"axis is 1", "rank 0"}},
    {"gather", F, "table.shape=[]", VJP_INVALID, {"table", "rank 0"}},
    {"gather", F, "y.shape=[2,12,5]", VJP_INVALID, {"y", "[2, 12, 5]", "[2, 3, 4, 5]"}},
    {"gather", B, "dy.shape=[2,3,3,5]", VJP_INVALID, {"dy", "[2, 3, 3, 5]", "[2, 3, 4, 5]"}},
    {"gather", B, "dy.shape=[12]", VJP_INVALID, {"dy", "rank 1", "rank 2"}},
    {"gather", B, "dtable.shape=[2,11,6]", VJP_INVALID, {"dtable", "[2, 11, 6]", "[2, 11, 5]"}},
    {"gather", B, "dtable.shape=[2,55]", VJP_INVALID, {"dtable", "[2, 55]"}},
    {"gather", B, "dtable.shape=[2,0,5]", VJP_INVALID, {"dtable has no rows", "attribute rows", "axis 1"}},
    {"gather", B, "dtable=absent", VJP_INVALID, {"dtable is missing", "attribute rows", "axis 1"}},
    {"gather", B, "@rows=10", VJP_INVALID, {"dtable", "[2, 11, 5]", "[2, 10, 5]"}},
    {"gather", B, "@rows=-1", VJP_INVALID, {"rows", "-1"}},
    {"gather", F, "table.shape=[1,1,1,1,1,1,11,5] @axis=6", VJP_INVALID, {"y", "rank 9", "8"}},
    {"gather", B, "dy.shape=[1,1,1,1,1,1,1,1] index.shape=[]", VJP_INVALID, {"dtable", "rank 9", "8"}},
    {"maxpool2d", F, "x.shape=[2,3,63]", VJP_INVALID, {"x", "rank 3", "4"}},
    {"maxpool2d", F, "y.shape=[2,3,4,4]", VJP_INVALID, {"y", "[2, 3, 4, 4]", "[2, 3, 4, 5]"}},
    {"maxpool2d", F, "argmax.shape=[2,3,5,4]", VJP_INVALID, {"argmax", "[2, 3, 5, 4]"}},
    {"maxpool2d", B, "dx.shape=[2,3,9,7]", VJP_INVALID, {"dx", "[2, 3, 9, 7]"}},
    {"maxpool2d", B, "dy.shape=[2,3,3,5]", VJP_INVALID, {"dy", "[2, 3, 3, 5]", "[2, 3, 4, 5]"}},
    {"linear", F, "a.shape=[7]", VJP_INVALID, {"a ", "rank 1", "2 or more"}},
    {"linear", F, "b.shape=[63]", VJP_INVALID, {"b ", "rank 1"}},
    {"linear", F, "b.shape=[8,9]", VJP_INVALID, {"K is 7", "8", "[8, 9]"}},
    {"linear", F, "b.shape=[9,7]", VJP_INVALID, {"K is 7", "9"}},
    {"linear", F, "@transpose_b=1", VJP_INVALID, {"K is 7", "9", "transposed"}},
    {"linear", F, "b.shape=[3,7,9]", VJP_INVALID, {"batch", "axis 0", "[3, 7, 9]", "[2, 5, 7]"}},
    {"linear", F, "b.shape=[1,2,7,9]", VJP_INVALID, {"b ", "rank 4"}},
    {"linear", F, "bias.shape=[5]", VJP_INVALID, {"bias", "[5]", "[9]"}},
    {"linear", F, "pre.shape=[2,9,5]", VJP_INVALID, {"pre", "[2, 9, 5]", "[2, 5, 9]"}},
    {"linear", F, "residual.shape=[9]", VJP_INVALID, {"residual", "[9]", "[2, 5, 9]"}},
    {"linear", B, "dresidual.shape=[10,9]", VJP_INVALID, {"dresidual", "[10, 9]", "[2, 5, 9]"}},
    {"linear", B, "dbias.shape=[1,9]", VJP_INVALID, {"dbias", "[1, 9]", "[9]"}},
    {"linear", B, "db.shape=[2,7,9]", VJP_INVALID, {"db", "[2, 7, 9]", "[7, 9]"}},
    {"linear", B, "dy.shape=[2,5,8]", VJP_INVALID, {"dy", "[2, 5, 8]", "[2, 5, 9]"}},
    {"conv2d", F, "x.shape=[2,4,63]", VJP_INVALID, {"x", "rank 3", "4"}},
    {"conv2d", F, "weight.shape=[6,2,9]", VJP_INVALID, {"weight", "rank 3", "4"}},
    {"conv2d", F, "weight.shape=[6,4,3,3]", VJP_INVALID, {"weight has 4 channels", "x has 2", "2 groups"}},
    {"conv2d", F, "weight.shape=[5,2,3,3]", VJP_INVALID, {"weight has 5 out_channels", "2 equal groups"}},
    {"conv2d", F, "x.shape=[2,3,7,9]", VJP_INVALID, {"x has 3 channels", "2 equal groups"}},
    {"conv2d", F, "y.shape=[2,6,5,4]", VJP_INVALID, {"y", "[2, 6, 5, 4]", "[2, 6, 4, 5]"}},
    {"conv2d", F, "bias.shape=[4]", VJP_INVALID, {"bias", "[4]", "[6]"}},
    {"conv2d", B, "dx.shape=[2,4,9,7]", VJP_INVALID, {"dx", "[2, 4, 9, 7]"}},
    {"conv2d", B, "dweight.shape=[6,2,3,4]", VJP_INVALID, {"dweight", "[6, 2, 3, 4]"}},
    {"conv2d", B, "dy.shape=[2,6,4,4]", VJP_INVALID, {"dy", "[2, 6, 4, 4]", "[2, 6, 4, 5]"}},
    {"attention", F, "q.shape=[5,4,3]", VJP_INVALID, {"q ", "rank 3", "4"}},
    {"attention", F, "k.shape=[14,2,3]", VJP_INVALID, {"k ", "rank 3", "4"}},
    {"attention", F, "k.shape=[1,7,2,3]", VJP_INVALID, {"batch is 2", "1", "[1, 7, 2, 3]"}},
    {"attention", F, "k.shape=[2,7,2,2]", VJP_INVALID, {"dim is 3", "2", "[2, 7, 2, 2]"}},
    {"attention", B, "q.shape=[2,5,4,0] k.shape=[2,7,2,0]", VJP_INVALID, {"q is [2, 5, 4, 0]", "no elements"}},
    {"attention", F, "k.shape=[2,4,3,3] v.shape=[2,4,3,3]", VJP_INVALID, {"4 heads of q", "3 heads of k"}},
    {"attention", B, "k.shape=[2,7,0,3]", VJP_INVALID, {"4 heads of q", "0 heads of k"}},
    {"attention", F, "k.shape=[2,4,2,3] v.shape=[2,4,2,3]", VJP_INVALID, {"causal", "4 keys", "5 times"}},
    {"attention", F, "v.shape=[2,7,3,2]", VJP_INVALID, {"v ", "[2, 7, 3, 2]", "[2, 7, 2, 3]"}},
    {"attention", F, "lse.shape=[2,5,4]", VJP_INVALID, {"lse", "[2, 5, 4]", "[2, 4, 5]"}},
    {"attention", B, "dy.shape=[2,5,3,4]", VJP_INVALID, {"dy", "[2, 5, 3, 4]", "[2, 5, 4, 3]"}},
    {"attention", B, "dk.shape=[2,7,4,3]", VJP_INVALID, {"dk", "[2, 7, 4, 3]", "[2, 7, 2, 3]"}},

    /* ---- attributes ---- */
    {"layer_norm", F, "@axes=0", VJP_INVALID, {"axes is 0", "1 to 3"}},
    {"layer_norm", F, "@axes=4", VJP_INVALID, {"axes is 4", "1 to 3"}},
    {"layer_norm", B, "@axes=-1", VJP_INVALID, {"axes is -1"}},
    {"layer_norm", F, "@axes=4294967297", VJP_INVALID, {"axes is 4294967297"}},
    {"layer_norm", F, "@eps=-1", VJP_INVALID, {"eps", "-1"}},
    {"layer_norm", B, "@eps=nan", VJP_INVALID, {"eps", "nan"}},
    {"rms_norm", F, "@eps=inf", VJP_INVALID, {"eps", "inf"}},
    {"rms_norm", B, "@axes=5", VJP_INVALID, {"axes is 5"}},
    {"group_norm", F, "@eps=-1e-30", VJP_INVALID, {"eps", "-1e-30"}},
    {"group_norm", F, "@groups=4", VJP_INVALID, {"6 channels", "4 groups"}},
    {"group_norm", B, "@groups=0", VJP_INVALID, {"6 channels", "0 groups"}},
    {"group_norm", B, "@groups=-2", VJP_INVALID, {"6 channels", "-2 groups"}},
    {"group_norm", F, "@groups=12", VJP_INVALID, {"6 channels", "12 groups"}},
    {"group_norm", F, "@layout=channels_last", VJP_INVALID, {"5 channels", "2 groups"}},
    {"group_norm", F, "@layout=2", VJP_INVALID, {"layout is 2", "0 to 1"}},
    {"rope", F, "@n_rot=5", VJP_INVALID, {"n_rot is 5", "even"}},
    {"rope", B, "@n_rot=10", VJP_INVALID, {"n_rot is 10", "head_dim is 8"}},
    {"rope", F, "@n_rot=-2", VJP_INVALID, {"n_rot is -2"}},
    {"rope", F, "@n_rot=0 x.shape=[2,5,3,7] y.shape=[2,5,3,7]", VJP_INVALID, {"n_rot is 7", "even"}},
    {"rope", F, "@pairing=2", VJP_INVALID, {"pairing is 2"}},
    {"rope", F, "@pairing=-1", VJP_INVALID, {"pairing is -1"}},
    {"cumsum", F, "@axis=3", VJP_INVALID, {"axis is 3", "rank 3"}},
    {"cumsum", B, "@axis=-4", VJP_INVALID, {"axis is -4", "rank 3"}},
    {"cumsum", F, "@axis=-9223372036854775808", VJP_INVALID, {"axis is -9223372036854775808"}},
    {"cumsum", F, "@exclusive=2", VJP_INVALID, {"exclusive is 2"}},
    {"cumsum", B, "@reverse=-1", VJP_INVALID, {"reverse is -1"}},
    {"gather", F, "@axis=3", VJP_INVALID, {"axis is 3", "rank 3"}},
    {"gather", B, "@axis=-4", VJP_INVALID, {"axis is -4", "rank 3"}},
    {"maxpool2d", F, "@kernel_h=0", VJP_INVALID, {"height", "kernel 0"}},
    {"maxpool2d", F, "@kernel_w=-3", VJP_INVALID, {"width", "kernel -3"}},
    {"maxpool2d", F, "@stride_h=-1", VJP_INVALID, {"height", "stride -1"}},
    {"maxpool2d", F, "@dilation_w=0", VJP_INVALID, {"width", "dilation 0"}},
    {"maxpool2d", F, "@padding_h=-1", VJP_INVALID, {"height", "padding -1"}},
    {"maxpool2d", F, "@padding_h=2", VJP_INVALID, {"height", "padding is 2", "half", "3"}},
    {"maxpool2d", F, "@kernel_w=9223372036854775807", VJP_INVALID, {"width", "kernel 9223372036854775807"}},
    {"maxpool2d", F, "@kernel_h=10", VJP_INVALID, {"extent of 10", "height of 7"}},
    {"maxpool2d", F, "@dilation_w=6", VJP_INVALID, {"extent of 13", "width of 9"}},
    {"maxpool2d", F, "@ceil_mode=2", VJP_INVALID, {"ceil_mode is 2"}},
    {"maxpool2d", F, "@layout=-1", VJP_INVALID, {"layout is -1"}},
    /* A window of two elements, four apart, around a plane of two rows: it covers only padding. */
    {"maxpool2d",
     F,
     "x.shape=[2,3,2,9] y=absent argmax=absent @kernel_h=2 @dilation_h=4 @padding_h=2 @stride_h=1 @padding_w=0",
     VJP_INVALID,
     {"padding alone", "height of 2", "window 0"}},
    {"maxpool2d", B, "@height=8", VJP_INVALID, {"8 x 0", "7 x 9"}},
    {"maxpool2d", F, "x.shape=[2,3,0,9] y=absent argmax=absent", VJP_INVALID, {"height of 0"}},
    {"linear", F, "@activation=7", VJP_INVALID, {"activation is 7", "0 to 6"}},
    {"linear", B, "@transpose_b=2", VJP_INVALID, {"transpose_b is 2"}},
    {"linear", B, "@zero_nan=-1", VJP_INVALID, {"zero_nan is -1"}},
    {"conv2d", F, "@groups=0", VJP_INVALID, {"out_channels", "0 equal groups"}},
    {"conv2d", F, "@groups=3", VJP_INVALID, {"x has 4 channels", "3 equal groups"}},
    {"conv2d", F, "@stride_h=0", VJP_INVALID, {"height", "stride 0"}},
    {"conv2d", F, "@padding_w=-1", VJP_INVALID, {"width", "padding -1"}},
    {"conv2d", F, "@dilation_w=0", VJP_INVALID, {"width", "dilation 0"}},
    {"conv2d", F, "@dilation_h=5", VJP_INVALID, {"extent of 11", "height of 7"}},
    {"conv2d", F, "@layout=2", VJP_INVALID, {"layout is 2"}},
    {"conv2d", F, "weight.shape=[6,2,0,3]", VJP_INVALID, {"height", "kernel 0"}},
    {"conv2d", F, "@padding_h=9223372036854775807", VJP_INVALID, {"height", "padding 9223372036854775807"}},
    {"conv2d", B, "@height=8", VJP_INVALID, {"8 x 0", "7 x 9"}},
    {"conv2d",
     F,
     "x.shape=[2147483648,4,1,1] weight.shape=[6,2,1,1] y=absent @padding_h=1073741824 @padding_w=1073741824 "
     "@stride_h=1 @stride_w=1",
     VJP_INVALID,
     {"y is too large", "overflows"}},
    {"attention", F, "@causal=2", VJP_INVALID, {"causal is 2"}},
    {"attention", F, "@scale=-1", VJP_INVALID, {"scale is -1", "positive"}},
    {"attention", B, "@scale=nan", VJP_INVALID, {"scale is nan"}},
    {"attention", B, "@scale=inf", VJP_INVALID, {"scale is inf"}},

    /* ---- overlaps ---- */
    {"layer_norm", F, "y.at=x+4", VJP_INVALID, {"y overlaps x", "exactly the same memory"}},
    {"layer_norm", F, "y.at=gamma", VJP_INVALID, {"y overlaps gamma", "may not share"}},
    {"layer_norm", F, "mean.at=y", VJP_INVALID, {"y overlaps mean"}},
    {"layer_norm", F, "rstd.at=mean+4", VJP_INVALID, {"mean overlaps rstd"}},
    {"layer_norm", F, "y.at=x y.flags=1", VJP_INVALID, {"y overlaps x", "accumulating"}},
    {"layer_norm", B, "dx.at=dy dx.flags=1", VJP_INVALID, {"dx overlaps dy", "accumulating"}},
    {"layer_norm", B, "dgamma.at=gamma", VJP_INVALID, {"dgamma overlaps gamma"}},
    {"layer_norm", B, "dbeta.at=dgamma", VJP_INVALID, {"dgamma overlaps dbeta"}},
    {"layer_norm", B, "dgamma.at=dx+256", VJP_INVALID, {"dx overlaps dgamma"}},
    {"rms_norm", B, "dx.at=x+8", VJP_INVALID, {"dx overlaps x"}},
    {"rms_norm", B, "dbeta.at=rstd", VJP_INVALID, {"dbeta overlaps rstd"}},
    {"group_norm", B, "dx.at=dy+4", VJP_INVALID, {"dx overlaps dy"}},
    {"rope", F, "y.at=x+32", VJP_INVALID, {"y overlaps x"}},
    {"rope", B, "dx.at=positions", VJP_INVALID, {"dx overlaps positions"}},
    {"cumsum", B, "dx.at=dy+12", VJP_INVALID, {"dx overlaps dy"}},
    {"cumsum", F, "y.at=x y.flags=1", VJP_INVALID, {"y overlaps x", "accumulating"}},
    {"gather", F, "y.at=table", VJP_INVALID, {"y overlaps table", "may not share"}},
    {"gather", B, "dtable.at=dy", VJP_INVALID, {"dtable overlaps dy"}},
    {"gather", B, "dtable.at=index", VJP_INVALID, {"dtable overlaps index"}},
    {"maxpool2d", F, "y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"maxpool2d", B, "dx.at=x", VJP_INVALID, {"dx overlaps x"}},
    {"linear", F, "y.at=a", VJP_INVALID, {"y overlaps a"}},
    {"linear", F, "pre.at=y", VJP_INVALID, {"y overlaps pre"}},
    {"linear", F, "y.at=residual", VJP_INVALID, {"y overlaps residual"}},
    {"linear", B, "dresidual.at=dy", VJP_INVALID, {"dresidual overlaps dy"}},
    {"linear", B, "da.at=a", VJP_INVALID, {"da overlaps a"}},
    {"linear", B, "db.at=b", VJP_INVALID, {"db overlaps b"}},
    {"conv2d", F, "y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"conv2d", B, "dx.at=x", VJP_INVALID, {"dx overlaps x"}},
    {"conv2d", B, "dweight.at=weight", VJP_INVALID, {"dweight overlaps weight"}},
    {"attention", F, "y.at=q", VJP_INVALID, {"y overlaps q"}},
    {"attention", F, "lse.flags=1", VJP_INVALID, {"lse", "accumulate"}},
    {"attention", B, "dq.at=q", VJP_INVALID, {"dq overlaps q"}},
    {"attention", B, "dv.at=v", VJP_INVALID, {"dv overlaps v"}},

    /* ---- values ---- */
    {"rope", F, "positions[3]=7", VJP_INVALID, {"positions[3] is 7", "[0, 7)"}},
    {"rope", B, "positions[0]=-1", VJP_INVALID, {"positions[0] is -1", "[0, 7)"}},
    {"rope", F, "positions.dtype=f32 positions[4]=2.5", VJP_INVALID, {"positions[4] is 2.5", "not an integer"}},
    {"rope",
     F,
     "positions=absent x.shape=[1,10,3,8] y.shape=[1,10,3,8]",
     VJP_INVALID,
     {"x", "10 times", "7 positions"}},
    {"gather", F, "index[11]=11", VJP_INVALID, {"index[11] is 11", "[0, 11)"}},
    {"gather", F, "index[0]=-1", VJP_INVALID, {"index[0] is -1"}},
    {"gather", B, "index[5]=2147483647", VJP_INVALID, {"index[5] is 2147483647"}},
    {"gather", B, "index[7]=-2147483648", VJP_INVALID, {"index[7] is -2147483648"}},
    {"gather",
     F,
     "index.dtype=i64 index.shape=[6] y.shape=[2,6,5] index[5]=4294967296",
     VJP_INVALID,
     {"index[5] is 4294967296"}},
    {"gather",
     B,
     "index.dtype=i64 index.shape=[6] dy.shape=[2,6,5] index[2]=-4294967295",
     VJP_INVALID,
     {"index[2] is -4294967295"}},
    {"gather", F, "index.dtype=f32 index[2]=nan", VJP_INVALID, {"index[2] is", "nan"}},
    {"gather", F, "index.dtype=f32 index[2]=inf", VJP_INVALID, {"index[2] is inf"}},
    {"gather", F, "index.dtype=f32 index[9]=0.5", VJP_INVALID, {"index[9] is 0.5", "not an integer"}},
    {"gather", B, "index.dtype=f32 index[9]=10.999", VJP_INVALID, {"index[9] is 10.99"}},
    {"gather", B, "index.dtype=f32 index[1]=16777218", VJP_INVALID, {"index[1] is 16777218", "f32"}},
    {"gather", F, "index.dtype=f32 index[1]=-1", VJP_INVALID, {"index[1] is -1", "[0, 11)"}},
    {"maxpool2d", B, "argmax[17]=63", VJP_INVALID, {"argmax[17] is 63", "[0, 63)"}},
    {"maxpool2d", B, "argmax[119]=-1", VJP_INVALID, {"argmax[119] is -1"}},

    /* ---- steps of training ---- */
    {"sum_squares", F, "x=absent", VJP_INVALID, {"x", "missing"}},
    {"add", F, "y.shape=[]", VJP_INVALID, {"y is a scalar; expected ["}},
    {"sum_squares", F, "y.shape=[1]", VJP_INVALID, {"y", "[1]", "expected a scalar"}},
    {"sum_squares", F, "y.dtype=bf16", VJP_INVALID, {"y is bf16", "f32"}},
    {"sum_squares", F, "y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"clip", F, "squares=absent", VJP_INVALID, {"squares", "missing"}},
    {"clip", F, "squares.shape=[1]", VJP_INVALID, {"squares", "[1]", "expected a scalar"}},
    {"clip", F, "squares.dtype=bf16", VJP_INVALID, {"squares is bf16", "f32"}},
    {"clip", F, "squares.dtype=i32", VJP_INVALID, {"squares is i32"}},
    {"clip", F, "@max_norm=-1", VJP_INVALID, {"max_norm is -1"}},
    {"clip", F, "@max_norm=nan", VJP_INVALID, {"max_norm is", "nan"}},
    {"clip", F, "@max_norm=inf", VJP_INVALID, {"max_norm is inf"}},
    {"clip", F, "scale.at=norm", VJP_INVALID, {"scale overlaps norm"}},
    {"clip", F, "scale.flags=1", VJP_INVALID, {"scale", "accumulate", "overwritten"}},
    {"adamw", F, "w=absent", VJP_INVALID, {"w ", "missing"}},
    {"adamw", F, "g=absent", VJP_INVALID, {"g ", "missing"}},
    {"adamw", F, "lr=absent", VJP_INVALID, {"lr", "missing"}},
    {"adamw", F, "step=absent", VJP_INVALID, {"step", "missing"}},
    {"adamw", F, "m.shape=[6,65]", VJP_INVALID, {"m ", "[6, 65]", "[2, 3, 65]"}},
    {"adamw", F, "g.shape=[2,3,64]", VJP_INVALID, {"g ", "[2, 3, 64]"}},
    {"adamw", F, "lr.shape=[1]", VJP_INVALID, {"lr", "[1]", "expected a scalar"}},
    {"adamw", F, "m.dtype=f16", VJP_INVALID, {"m is f16", "f32 or bf16"}},
    {"adamw", F, "m.dtype=bf16", VJP_INVALID, {"v is f32 and m is bf16", "same dtype"}},
    {"adamw", F, "m_out.dtype=bf16", VJP_INVALID, {"m_out is bf16 and m is f32", "same dtype"}},
    {"adamw", F, "g.dtype=f16", VJP_INVALID, {"g is f16", "f32 or bf16"}},
    {"adamw", F, "step.dtype=f16", VJP_INVALID, {"step is f16", "i32, i64 or f32"}},
    {"adamw", F, "step[0]=0", VJP_INVALID, {"step is 0", "first step is 1"}},
    {"adamw", F, "step[0]=-3", VJP_INVALID, {"step is -3"}},
    {"adamw", F, "step.dtype=f32 step[0]=1.5", VJP_INVALID, {"step is 1.5", "not an integer"}},
    {"adamw", F, "@beta1=1", VJP_INVALID, {"beta1 is 1", "less than 1"}},
    {"adamw", F, "@beta2=-0.1", VJP_INVALID, {"beta2 is -0.1"}},
    {"adamw", F, "@beta2=nan", VJP_INVALID, {"beta2 is", "nan"}},
    {"adamw", F, "@eps=-1e-8", VJP_INVALID, {"eps is -1e-08"}},
    {"adamw", F, "@weight_decay=-1", VJP_INVALID, {"weight_decay is -1"}},
    {"adamw", F, "w_out.flags=1", VJP_INVALID, {"w_out", "accumulate", "overwritten"}},
    {"adamw", F, "w_out.at=g", VJP_INVALID, {"w_out overlaps g", "may not share"}},
    {"adamw", F, "m_out.at=m+4", VJP_INVALID, {"m_out overlaps m", "exactly the same"}},
    {"adamw", F, "v_out.at=m", VJP_INVALID, {"v_out overlaps m"}},
    {"adamw", F, "w_out.at=m_out", VJP_INVALID, {"w_out overlaps m_out"}},
    {"sgd", F, "w=absent", VJP_INVALID, {"w ", "missing"}},
    {"sgd", F, "momentum.shape=[390]", VJP_INVALID, {"momentum", "[390]", "[2, 3, 65]"}},
    {"sgd", F, "scale.shape=[1]", VJP_INVALID, {"scale", "[1]"}},
    {"sgd", F, "@beta=1", VJP_INVALID, {"beta is 1"}},
    {"sgd", F, "@weight_decay=inf", VJP_INVALID, {"weight_decay is inf"}},
    {"sgd", F, "@nesterov=2", VJP_INVALID, {"nesterov is 2"}},
    {"sgd", F, "momentum_out.flags=1", VJP_INVALID, {"momentum_out", "accumulate"}},
    {"sgd", F, "momentum_out.at=w", VJP_INVALID, {"momentum_out overlaps w"}},
    /* ---- cross_entropy, swiglu ---- */
    {"cross_entropy", F, "target=absent", VJP_INVALID, {"target", "missing"}},
    {"cross_entropy", B, "dloss=absent", VJP_INVALID, {"dloss", "missing"}},
    {"cross_entropy", F, "lse.flags=1", VJP_INVALID, {"lse", "accumulate"}},
    {"cross_entropy", F, "loss.dtype=bf16", VJP_INVALID, {"loss is bf16", "f32"}},
    {"cross_entropy", B, "target.dtype=f64", VJP_INVALID, {"target is f64", "i32, i64 or f32"}},
    {"cross_entropy", F, "logits.shape=[]", VJP_INVALID, {"logits", "rank 0", "classes"}},
    {"cross_entropy", F, "logits.shape=[2,3,0]", VJP_INVALID, {"logits", "[2, 3, 0]", "no classes"}},
    {"cross_entropy", F, "loss.shape=[1]", VJP_INVALID, {"loss", "[1]", "expected a scalar"}},
    {"cross_entropy", F, "target.shape=[6]", VJP_INVALID, {"target", "[6]", "[2, 3]"}},
    {"cross_entropy", B, "lse.shape=[2,3,1]", VJP_INVALID, {"lse", "[2, 3, 1]", "[2, 3]"}},
    {"cross_entropy", B, "dlogits.shape=[6,65]", VJP_INVALID, {"dlogits", "[6, 65]", "[2, 3, 65]"}},
    {"cross_entropy", F, "@label_smoothing=-0.1", VJP_INVALID, {"label_smoothing is -0.1", "0 to 1"}},
    {"cross_entropy", B, "@label_smoothing=1.5", VJP_INVALID, {"label_smoothing is 1.5"}},
    {"cross_entropy", B, "@label_smoothing=nan", VJP_INVALID, {"label_smoothing", "nan"}},
    {"cross_entropy", F, "@reduction=2", VJP_INVALID, {"reduction is 2"}},
    {"cross_entropy", B, "dlogits.at=logits dlogits.flags=1", VJP_INVALID, {"dlogits overlaps logits", "accumulating"}},
    {"cross_entropy", B, "dlogits.at=lse", VJP_INVALID, {"dlogits overlaps lse"}},
    {"cross_entropy", F, "lse.at=logits", VJP_INVALID, {"lse overlaps logits"}},
    {"cross_entropy", F, "target[3]=65", VJP_INVALID, {"target[3] is 65", "[0, 65)", "classes", "-100"}},
    {"cross_entropy", F, "target[0]=-1", VJP_INVALID, {"target[0] is -1", "ignore_index, -100"}},
    {"cross_entropy", B, "target[5]=-101", VJP_INVALID, {"target[5] is -101"}},
    {"cross_entropy", B, "target[5]=-100 @ignore_index=-99", VJP_INVALID, {"target[5] is -100", "ignore_index, -99"}},
    {"cross_entropy", F, "target.dtype=f32 target[2]=1.5", VJP_INVALID, {"target[2] is 1.5", "not an integer"}},
    {"cross_entropy", F, "target.dtype=f32 target[2]=-7", VJP_INVALID, {"target[2] is -7", "ignore_index"}},
    {"cross_entropy",
     F,
     "target.dtype=i64 target.shape=[3] logits.shape=[3,65] lse.shape=[3] target[1]=-4294967396",
     VJP_INVALID,
     {"target[1] is -4294967396"}},
    {"cross_entropy",
     F,
     "target[4]=65 @ignore_index=4294967361",
     VJP_INVALID,
     {"target[4] is 65", "ignore_index, 4294967361"}},
    /* ---- linear_cross_entropy ---- */
    {"linear_cross_entropy", F, "weight=absent", VJP_INVALID, {"weight", "missing"}},
    {"linear_cross_entropy", B, "dloss=absent", VJP_INVALID, {"dloss", "missing"}},
    {"linear_cross_entropy", F, "x.shape=[]", VJP_INVALID, {"x has rank 0", "[..., dim]"}},
    {"linear_cross_entropy", F, "weight.shape=[1105]", VJP_INVALID, {"weight has rank 1", "[classes, dim]"}},
    {"linear_cross_entropy", B, "weight.shape=[65,16]", VJP_INVALID, {"[2, 3, 17]", "[65, 16]", "dim is 17", "16"}},
    {"linear_cross_entropy", F, "weight.shape=[0,17]", VJP_INVALID, {"weight", "[0, 17]", "no classes"}},
    {"linear_cross_entropy", F, "x.shape=[2,3,0] weight.shape=[65,0]", VJP_INVALID, {"weight", "[65, 0]", "no dim"}},
    {"linear_cross_entropy", F, "lse.flags=1", VJP_INVALID, {"lse", "accumulate"}},
    {"linear_cross_entropy", B, "lse.flags=1", VJP_INVALID, {"lse", "accumulate"}},
    {"linear_cross_entropy", B, "loss.dtype=bf16", VJP_INVALID, {"loss is bf16", "f32"}},
    {"linear_cross_entropy", B, "dweight.shape=[17,65]", VJP_INVALID, {"dweight", "[17, 65]", "[65, 17]"}},
    {"linear_cross_entropy", F, "target.shape=[6]", VJP_INVALID, {"target", "[6]", "[2, 3]"}},
    {"linear_cross_entropy", F, "@label_smoothing=1.5", VJP_INVALID, {"label_smoothing is 1.5", "0 to 1"}},
    {"linear_cross_entropy", B, "@label_smoothing=nan", VJP_INVALID, {"label_smoothing", "nan"}},
    {"linear_cross_entropy", B, "dx.at=x", VJP_INVALID, {"dx overlaps x"}},
    {"linear_cross_entropy", B, "dweight.at=weight", VJP_INVALID, {"dweight overlaps weight"}},
    {"linear_cross_entropy", F, "target[3]=65", VJP_INVALID, {"target[3] is 65", "[0, 65)", "classes", "-100"}},
    {"linear_cross_entropy", B, "target[5]=-101", VJP_INVALID, {"target[5] is -101", "ignore_index, -100"}},
    {"swiglu", F, "up=absent", VJP_INVALID, {"up", "missing"}},
    {"swiglu", F, "up.shape=[65,3]", VJP_INVALID, {"up", "[65, 3]", "[3, 65]"}},
    {"swiglu", F, "up.dtype=bf16", VJP_INVALID, {"up is bf16", "f32"}},
    {"swiglu", F, "y.at=gate y.flags=1", VJP_INVALID, {"y overlaps gate", "accumulating"}},
    {"swiglu", F, "y.at=up+4", VJP_INVALID, {"y overlaps up", "exactly the same memory"}},
    {"swiglu", B, "gate=absent", VJP_INVALID, {"gate", "missing"}},
    {"swiglu", B, "dup.shape=[195]", VJP_INVALID, {"dup", "[195]", "[3, 65]"}},
    {"swiglu", B, "dup.at=dgate", VJP_INVALID, {"dgate overlaps dup", "may not share"}},
    {"swiglu", B, "dgate.at=dy dup.at=dy", VJP_INVALID, {"dgate overlaps dup"}},
    {"swiglu", B, "dgate.at=up y.at=up", VJP_INVALID, {"dgate overlaps y"}},
    /* ---- add, mul, scale, mean, dropout, cast ---- */
    {"add", F, "b=absent", VJP_INVALID, {"b ", "missing"}},
    {"add", F, "b.shape=[2,3]", VJP_INVALID, {"b ", "[2, 3]", "[3, 65]"}},
    {"add", F, "b.shape=[1,2,3,65]", VJP_INVALID, {"b has rank 4", "last axes of a", "3"}},
    {"add", F, "y.shape=[6,65]", VJP_INVALID, {"y", "[6, 65]", "[2, 3, 65]"}},
    {"add", F, "@b_axes=1", VJP_INVALID, {"b_axes is 1", "b has rank 2"}},
    {"add", F, "@b_axes=-2", VJP_INVALID, {"b_axes is -2", "-1 to 3", "a"}},
    {"add", F, "b.dtype=f16", VJP_INVALID, {"b is f16", "f32"}},
    {"add", F, "y.at=b", VJP_INVALID, {"y overlaps b"}},
    {"add", F, "y.at=a y.flags=1", VJP_INVALID, {"y overlaps a", "accumulating"}},
    {"add", B, "dy=absent", VJP_INVALID, {"dy", "missing"}},
    {"add", B, "db.shape=[65,3]", VJP_INVALID, {"db", "[65, 3]", "[3, 65]"}},
    {"add", B, "@b_axes=4", VJP_INVALID, {"b_axes is 4", "-1 to 3", "dy"}},
    {"add", B, "@b_axes=3", VJP_INVALID, {"b_axes is 3", "db has rank 2"}},
    {"add", B, "da.at=dy+4", VJP_INVALID, {"da overlaps dy", "exactly the same memory"}},
    {"add", B, "db.at=dy", VJP_INVALID, {"db overlaps dy"}},
    {"mul", F, "a=absent", VJP_INVALID, {"a ", "missing"}},
    {"mul", F, "b.shape=[3,64]", VJP_INVALID, {"b ", "[3, 64]", "[3, 65]"}},
    {"mul", F, "y.at=b", VJP_INVALID, {"y overlaps b"}},
    {"mul", B, "a=absent", VJP_INVALID, {"a is missing", "db"}},
    {"mul", B, "b=absent", VJP_INVALID, {"b is missing", "da"}},
    {"mul", B, "a.shape=[2,3,64]", VJP_INVALID, {"a ", "[2, 3, 64]", "[2, 3, 65]"}},
    {"mul", B, "db.shape=[65]", VJP_INVALID, {"db", "[65]", "[3, 65]"}},
    {"mul", B, "da.at=b", VJP_INVALID, {"da overlaps b"}},
    {"scale", F, "@factor=nan", VJP_INVALID, {"factor is", "nan"}},
    {"scale", F, "@factor=inf", VJP_INVALID, {"factor is inf"}},
    {"scale", F, "y.shape=[65,3]", VJP_INVALID, {"y", "[65, 3]", "[3, 65]"}},
    {"scale", B, "@factor=-1e39", VJP_INVALID, {"factor is -1e+39", "f32"}},
    {"scale", B, "dy=absent", VJP_INVALID, {"dy", "missing"}},
    {"scale", B, "dx.at=dy+4", VJP_INVALID, {"dx overlaps dy"}},
    {"mean", F, "@axis=3", VJP_INVALID, {"axis is 3", "rank 3"}},
    {"mean", F, "@axis=-4", VJP_INVALID, {"axis is -4", "rank 3"}},
    {"mean", F, "@axes=-1", VJP_INVALID, {"axes is -1"}},
    {"mean", F, "@axes=3", VJP_INVALID, {"3 axes from axis 1 on", "rank 3"}},
    {"mean", F, "x.shape=[] y.shape=[]", VJP_INVALID, {"axis is 1", "rank 0"}},
    {"mean", F, "y.shape=[2,17]", VJP_INVALID, {"y", "[2, 17]", "[2, 3]"}},
    {"mean", F, "x.shape=[2,0,3]", VJP_INVALID, {"x", "[2, 0, 3]", "no element"}},
    {"mean", F, "y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"mean", B, "x=absent dx=absent", VJP_INVALID, {"x and dx", "missing"}},
    {"mean", B, "dy.shape=[2,17]", VJP_INVALID, {"dy", "[2, 17]", "[2, 3]"}},
    {"mean", B, "x.shape=[2,16,3]", VJP_INVALID, {"dx", "[2, 17, 3]", "[2, 16, 3]"}},
    {"mean", B, "@axes=4", VJP_INVALID, {"axes is 4", "rank 3"}},
    {"dropout", F, "@p=1", VJP_INVALID, {"p is 1", "less than 1"}},
    {"dropout", F, "@p=-0.1", VJP_INVALID, {"p is -0.1"}},
    {"dropout", F, "counter=absent", VJP_INVALID, {"counter", "missing"}},
    {"dropout", F, "counter.shape=[1]", VJP_INVALID, {"counter", "[1]", "[2]"}},
    {"dropout", F, "counter.dtype=f16", VJP_INVALID, {"counter is f16", "i32, i64 or f32"}},
    {"dropout", F, "counter.dtype=f32 counter[1]=0.5", VJP_INVALID, {"counter[1] is 0.5", "not an integer"}},
    {"dropout", B, "counter.dtype=f32 counter[0]=16777218", VJP_INVALID, {"counter[0] is 16777218", "f32"}},
    {"dropout", B, "@p=nan", VJP_INVALID, {"p is", "nan"}},
    {"dropout", B, "dx.at=counter", VJP_INVALID, {"dx overlaps counter"}},
    {"cast", F, "y.dtype=i32", VJP_INVALID, {"y is i32", "f32, bf16, f16 or f64"}},
    {"cast", F, "x=absent", VJP_INVALID, {"x", "missing"}},
    {"cast", F, "y.shape=[65]", VJP_INVALID, {"y", "[65]", "[3, 65]"}},
    {"cast", F, "y.at=x", VJP_INVALID, {"y overlaps x"}},
    {"cast", B, "dy.dtype=i32", VJP_INVALID, {"dy is i32"}},
    {"cast", B, "dx.dtype=i64 dx.shape=[3,32] dy.shape=[3,32]", VJP_INVALID, {"dx is i64"}},
    {"cast", B, "dx.shape=[3,64]", VJP_INVALID, {"dx", "[3, 64]", "[3, 65]"}},
};

enum { ROWS = sizeof rows / sizeof rows[0] };

/* ---- Edits ------------------------------------------------------------------------------------------- */

static bool edit_list(const char *text, int64_t *list, int *count) {
    *count = 0;
    if (*text != '[') return false;
    for (text++; *text && *text != ']';) {
        char *end;
        if (*count == VJP_MAX_DIMS) return false;
        list[(*count)++] = strtoll(text, &end, 10);
        if (end == text) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return *text == ']';
}

static bool edit_member(call *made, int slot, const char *member, const char *value) {
    vjp_tensor *tensor = &made->tensor[slot];
    int count;
    if (strcmp(member, "shape") == 0) {
        int64_t shape[VJP_MAX_DIMS];
        if (!edit_list(value, shape, &count)) return false;
        vjp_tensor packed = vjp_tensor_of(tensor->data, (vjp_dtype)tensor->dtype, count, shape);
        packed.offset = tensor->offset;
        packed.flags = tensor->flags;
        *tensor = packed;
    } else if (strcmp(member, "stride") == 0) {
        return edit_list(value, tensor->stride, &count) && count == tensor->ndim;
    } else if (strcmp(member, "ndim") == 0) {
        tensor->ndim = atoi(value);
    } else if (strcmp(member, "dtype") == 0) {
        int dtype = vjp_dtype_find(value);
        if (dtype == VJP_F32 && tensor->dtype == VJP_I32) /* the same indices as floats */
            for (size_t i = 0; i < call_bytes(tensor) / 4; i++)
                ((float *)tensor->data)[i] = (float)((int32_t *)tensor->data)[i];
        if (dtype == VJP_I64 && tensor->dtype == VJP_I32) /* half as many indices, widened from the back */
            for (size_t i = call_bytes(tensor) / 8; i-- > 0;)
                ((int64_t *)tensor->data)[i] = ((int32_t *)tensor->data)[i];
        tensor->dtype = dtype >= 0 ? dtype : atoi(value);
    } else if (strcmp(member, "data") == 0) {
        tensor->data = NULL;
    } else if (strcmp(member, "offset") == 0) {
        tensor->offset = strtoull(value, NULL, 10);
    } else if (strcmp(member, "flags") == 0) {
        tensor->flags = (uint32_t)atoi(value);
    } else if (strcmp(member, "reserved") == 0) {
        tensor->reserved = (uint32_t)atoi(value);
    } else if (strcmp(member, "at") == 0) {
        char other[32];
        const char *plus = strchr(value, '+');
        snprintf(other, sizeof other, "%.*s", plus ? (int)(plus - value) : (int)strlen(value), value);
        int source = call_slot(made, other);
        if (source < 0) return false;
        tensor->data = (char *)made->tensor[source].data + (plus ? atoi(plus + 1) : 0);
    } else {
        return false;
    }
    return true;
}

static bool edit_one(call *made, char *text) {
    char *equals = strchr(text, '=');
    if (!equals) return false;
    *equals = 0;
    const char *value = equals + 1;
    if (text[0] == '@') return call_set_attribute(made, text + 1, value);
    char *dot = strchr(text, '.'), *bracket = strchr(text, '[');
    if (dot) *dot = 0;
    if (bracket) *bracket = 0;
    int slot = call_slot(made, text);
    if (slot < 0) return false;
    if (bracket) {
        /* Through a double every i32, f32 and smaller i64 is exact. */
        call_put(&made->tensor[slot], atoi(bracket + 1), strtod(value, NULL));
        return true;
    }
    if (dot) return edit_member(made, slot, dot + 1, value);
    made->pointer[slot] = NULL;
    return strcmp(value, "absent") == 0;
}

static bool edit_call(call *made, const char *text) {
    char copy[256];
    assert_true(strlen(text) < sizeof copy);
    snprintf(copy, sizeof copy, "%s", text);
    char *rest = copy;
    for (char *word; (word = strtok_r(rest, " ", &rest));)
        if (!edit_one(made, word)) return false;
    return true;
}

/* ---- Tests ------------------------------------------------------------------------------------------- */

static vjp_device *open_device(const char *name) {
    vjp_device *device;
    vjp_options options = {.struct_size = sizeof(vjp_options), .threads = 2, .workspace_bytes = 4 << 20};
    assert_int_equal(vjp_open(name, &options, &device), VJP_OK);
    return device;
}

/* Returns what went wrong, or NULL. */
static const char *try_row(vjp_device *device, const refusal *row) {
    static char text[1024];
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    if (!call_make(&made, device, sample_find(row->op), row->pass, types, 7)) return "no sample";
    const char *wrong = NULL;
    if (call_run(device, &made) != VJP_OK) {
        snprintf(text, sizeof text, "the valid call was refused: %s", vjp_error(device));
        wrong = text;
    } else if (!edit_call(&made, row->edit)) {
        wrong = "the edit makes no sense";
    } else {
        unsigned char *before = malloc(made.block_bytes);
        memcpy(before, made.block, made.block_bytes);
        vjp_status status = call_run(device, &made);
        const char *sentence = vjp_error(device);
        char prefix[64];
        snprintf(prefix, sizeof prefix, "%s.%s: ", row->op, row->pass == VJP_FORWARD ? "forward" : "backward");
        if (status != row->status) {
            snprintf(text, sizeof text, "%s instead of %s: %s", vjp_status_name(status), vjp_status_name(row->status),
                     sentence);
            wrong = text;
        } else if (memcmp(before, made.block, made.block_bytes) != 0) {
            wrong = "memory was changed";
        } else if (strncmp(sentence, prefix, strlen(prefix)) != 0) {
            snprintf(text, sizeof text, "the sentence does not begin with \"%s\": %s", prefix, sentence);
            wrong = text;
        }
        for (int i = 0; !wrong && i < MAX_WORDS && row->words[i]; i++)
            if (!strstr(sentence + strlen(prefix), row->words[i])) {
                snprintf(text, sizeof text, "\"%s\" is not in: %s", row->words[i], sentence);
                wrong = text;
            }
        free(before);
    }
    call_free(&made);
    return wrong;
}

static void every_row(const char *name) {
    vjp_device *device = open_device(name);
    int failed = 0;
    for (int i = 0; i < ROWS; i++) {
        const char *wrong = try_row(device, &rows[i]);
        if (!wrong) continue;
        failed++;
        print_error("%s %s.%s %s\n    %s\n", name, rows[i].op, rows[i].pass == VJP_FORWARD ? "forward" : "backward",
                    rows[i].edit, wrong);
    }
    vjp_close(device);
    assert_int_equal(failed, 0);
}

static void cpu_refuses(void **state) {
    (void)state;
    every_row("cpu");
}

static void ref_refuses(void **state) {
    (void)state;
    every_row("ref");
}

/* Every op and pass must have rows here: a new op cannot forget its refusals. */
static void every_pass_has_rows(void **state) {
    (void)state;
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++) {
            const char *name = vjp_op_describe(vjp_op_at(op))->name;
            int found = 0;
            for (int i = 0; i < ROWS; i++)
                found += strcmp(rows[i].op, name) == 0 && (int)rows[i].pass == pass;
            if (found < 3) print_error("%s has %d rows for pass %d\n", name, found, pass);
            assert_true(found >= 3);
        }
}

static void cpu_has_no_f64(void **state) {
    (void)state;
    vjp_device *cpu = open_device("cpu"), *ref = open_device("ref");
    for (size_t op = 0; op < vjp_op_count(); op++)
        for (int pass = 0; pass < vjp_passes(vjp_op_describe(vjp_op_at(op))); pass++) {
            call made;
            sample_types types = {VJP_F64, VJP_F64, VJP_I64};
            const char *name = vjp_op_describe(vjp_op_at(op))->name;
            assert_true(call_make(&made, cpu, sample_find(name), (vjp_pass)pass, types, 3));
            unsigned char *before = malloc(made.block_bytes);
            memcpy(before, made.block, made.block_bytes);
            if (vjp_supports(cpu, made.op, (vjp_pass)pass, VJP_F64) != VJP_OK) {
                assert_int_equal(call_run(cpu, &made), VJP_UNSUPPORTED);
                assert_non_null(strstr(vjp_error(cpu), "f64"));
                assert_non_null(strstr(vjp_error(cpu), name));
                assert_memory_equal(before, made.block, made.block_bytes);
            }
            assert_int_equal(call_run(ref, &made), VJP_OK);
            free(before);
            call_free(&made);
        }
    vjp_close(cpu);
    vjp_close(ref);
}

/* What is wrong with the call itself rather than with a tensor. */
/* The kernel must support the dtype of a slot of any float type, as it must T. */
static void cpu_casts_to_no_f64(void **state) {
    (void)state;
    vjp_device *cpu = open_device("cpu"), *ref = open_device("ref");
    float x[3] = {1, -2, 1.0f / 3};
    double y[3] = {9, 9, 9};
    vjp_tensor tx = vjp_tensor_of(x, VJP_F32, 1, (int64_t[]){3}), ty = vjp_tensor_of(y, VJP_F64, 1, (int64_t[]){3});
    assert_int_equal(vjp_cast_forward(cpu, &ty, &tx), VJP_UNSUPPORTED);
    assert_string_equal(vjp_error(cpu), "cast.forward: cpu has no kernel for f64");
    assert_true(y[0] == 9);
    assert_int_equal(vjp_cast_forward(ref, &ty, &tx), VJP_OK);
    assert_true(y[1] == -2 && y[2] == (double)x[2]);
    vjp_close(cpu);
    vjp_close(ref);
}

static void misuse_of_call(void **state) {
    (void)state;
    vjp_device *device = open_device("cpu");
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    assert_true(call_make(&made, device, sample_find("cumsum"), VJP_FORWARD, types, 3));
    assert_int_equal(vjp_call(device, NULL, VJP_FORWARD, made.pointer, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "op is NULL"));
    assert_int_equal(vjp_call(device, made.op, (vjp_pass)2, made.pointer, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "unknown pass"));
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, made.pointer, 3, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "3 tensors"));
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, NULL, 2, NULL), VJP_INVALID);
    assert_non_null(strstr(vjp_error(device), "NULL"));
    assert_int_equal(vjp_call(NULL, made.op, VJP_FORWARD, made.pointer, 2, NULL), VJP_NO_DEVICE);
    const vjp_tensor *none[2] = {0};
    assert_int_equal(vjp_call(device, made.op, VJP_FORWARD, none, 2, NULL), VJP_INVALID);
    /* A later success leaves no sentence of an earlier failure. */
    assert_int_equal(call_run(device, &made), VJP_OK);
    assert_string_equal(vjp_error(device), "");
    call_free(&made);
    vjp_close(device);
}

/* No tensor may overlap the workspace that the call uses. */
static void workspace_overlap(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        call made;
        sample_types types = {VJP_F32, VJP_F32, VJP_I32};
        assert_true(call_make(&made, device, sample_find_large("layer_norm"), VJP_BACKWARD, types, 3));
        size_t bytes;
        assert_int_equal(
            vjp_workspace_size(device, made.op, made.pass, made.pointer, made.count, made.attributes, &bytes), VJP_OK);
        assert_true(bytes > 0);
        size_t room = bytes + made.block_bytes + 256;
        unsigned char *workspace = aligned_alloc(64, room / 64 * 64);
        memset(workspace, 0, room / 64 * 64);
        assert_int_equal(vjp_set_workspace(device, workspace, room / 64 * 64), VJP_OK);
        assert_int_equal(call_run(device, &made), VJP_OK);
        for (size_t slot = 0; slot < made.count; slot++) {
            void *own = made.tensor[slot].data;
            made.tensor[slot].data = workspace + (bytes - 1) / 64 * 64; /* the last line that is needed */
            assert_int_equal(call_run(device, &made), VJP_INVALID);
            assert_non_null(strstr(vjp_error(device), "workspace"));
            assert_non_null(strstr(vjp_error(device), made.info->pass[made.pass].slots[slot].name));
            made.tensor[slot].data = own;
        }
        call_free(&made);
        vjp_close(device);
        free(workspace);
    }
}

/* The rows of a tensor may lie apart so far that only the last one is in the workspace. */
static void last_row_in_workspace(void **state) {
    (void)state;
    vjp_device *device = open_device("cpu");
    enum { TIMES = 3, HEADS = 2, DIM = 8, STEP = 64 };
    const int64_t shape[] = {1, TIMES, HEADS, DIM};
    static _Alignas(64) float memory[TIMES * STEP + (1 << 20)];
    float y[TIMES * HEADS * DIM] = {0}, k[TIMES * HEADS * DIM] = {0};
    vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 4, shape), tk = vjp_tensor_of(k, VJP_F32, 4, shape);
    vjp_tensor tq = vjp_tensor_of(memory, VJP_F32, 4, shape);
    tq.stride[1] = STEP;
    assert_int_equal(vjp_set_workspace(device, memory + TIMES * STEP, 4 << 20), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &ty, NULL, &tq, &tk, &tk, NULL, NULL), VJP_OK);
    assert_int_equal(vjp_set_workspace(device, memory + (TIMES - 1) * STEP, 4 << 20), VJP_OK);
    assert_int_equal(vjp_attention_forward(device, &ty, NULL, &tq, &tk, &tk, NULL, NULL), VJP_INVALID);
    assert_string_equal(vjp_error(device), "attention.forward: q overlaps the device's workspace");
    vjp_close(device);
}

/* Several threads check indices in chunks; the sentence still names the first bad one. */
static void first_bad_index(void **state) {
    (void)state;
    enum { COUNT = 1 << 20, ROWS_OF_TABLE = 5 };
    static const char *const names[] = {"cpu", "ref"};
    static const vjp_dtype types[] = {VJP_I32, VJP_I64, VJP_F32};
    float table[ROWS_OF_TABLE] = {1, 2, 3, 4, 5};
    float *y = malloc(COUNT * sizeof *y);
    void *data = malloc(COUNT * sizeof(int64_t));
    vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 1, (int64_t[]){COUNT});
    vjp_tensor tt = vjp_tensor_of(table, VJP_F32, 1, (int64_t[]){ROWS_OF_TABLE});
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        for (int t = 0; t < 3; t++) {
            vjp_tensor index = vjp_tensor_of(data, types[t], 1, (int64_t[]){COUNT});
            for (int64_t k = 0; k < COUNT; k++) {
                call_put(&index, k, (double)(k % ROWS_OF_TABLE));
                y[k] = -1;
            }
            assert_int_equal(vjp_gather_forward(device, &ty, &tt, &index, NULL), VJP_OK);
            assert_true(y[COUNT - 1] == table[(COUNT - 1) % ROWS_OF_TABLE]);
            y[0] = -1;
            static const int64_t bad[] = {COUNT - 1, COUNT / 2 + 3, 70001, 0};
            for (int b = 0; b < 4; b++) { /* each is before the ones that are already bad */
                char position[64];
                call_put(&index, bad[b], b % 2 ? -7 : ROWS_OF_TABLE);
                snprintf(position, sizeof position, "index[%lld] is %d", (long long)bad[b], b % 2 ? -7 : ROWS_OF_TABLE);
                assert_int_equal(vjp_gather_forward(device, &ty, &tt, &index, NULL), VJP_INVALID);
                if (!strstr(vjp_error(device), position)) print_error("%s: %s\n", position, vjp_error(device));
                assert_non_null(strstr(vjp_error(device), position));
                assert_true(y[0] == -1);
            }
        }
        vjp_close(device);
    }
    free(y);
    free(data);
}

/* ---- What is not refused: nothing to do -------------------------------------------------------------- */

typedef struct nothing {
    const char *op;
    vjp_pass pass;
    const char *edit;
    const char *zero; /* an output that must become zero, or stay as it is when accumulating */
} nothing;

static const nothing empties[] = {
    {"layer_norm", F, "x.shape=[0,65] y.shape=[0,65] mean.shape=[0] rstd.shape=[0]", NULL},
    {"layer_norm", F, "x.shape=[0,65] y.shape=[0,65] mean.shape=[0] rstd.shape=[0] x.data=NULL y.data=NULL", NULL},
    {"layer_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] mean.shape=[0] rstd.shape=[0]", "dgamma"},
    {"layer_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] mean.shape=[0] rstd.shape=[0]", "dbeta"},
    {"rms_norm", F, "x.shape=[2,0,65] y.shape=[2,0,65] rstd.shape=[2,0]", NULL},
    {"rms_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] rstd.shape=[0] x.data=NULL", "dgamma"},
    {"rms_norm", B, "x.shape=[0,65] dy.shape=[0,65] dx.shape=[0,65] rstd=absent", "dbeta"},
    {"group_norm", F, "x.shape=[0,6,3,5] y.shape=[0,6,3,5] mean.shape=[0,2] rstd.shape=[0,2]", NULL},
    {"group_norm", B, "x.shape=[0,6,3] dy.shape=[0,6,3] dx.shape=[0,6,3] mean.shape=[0,2] rstd.shape=[0,2]", "dgamma"},
    {"group_norm", B, "x.shape=[0,6,3] dy.shape=[0,6,3] dx.shape=[0,6,3] mean.shape=[0,2] rstd.shape=[0,2]", "dbeta"},
    {"rope", F, "x.shape=[0,5,3,8] y.shape=[0,5,3,8]", NULL},
    {"rope", B, "dx.shape=[2,0,3,8] dy.shape=[2,0,3,8] positions.shape=[0]", NULL},
    {"rope", F, "x.shape=[2,5,0,8] y.shape=[2,5,0,8]", NULL},
    {"rope", F, "x.shape=[2,5,3,0] y.shape=[2,5,3,0] @n_rot=0 cosine.shape=[7,0] sine.shape=[7,0]", NULL},
    {"cumsum", F, "x.shape=[2,0,3] y.shape=[2,0,3]", NULL},
    {"cumsum", B, "dx.shape=[0,17,3] dy.shape=[0,17,3] dx.data=NULL dy.data=NULL", NULL},
    {"gather", F, "index.shape=[0] y.shape=[2,0,5]", NULL},
    {"gather", F, "index.shape=[0] y.shape=[2,0,5] table.shape=[2,0,5] index.data=NULL", NULL},
    {"gather", B, "index.shape=[0] dy.shape=[2,0,5]", "dtable"},
    {"maxpool2d", F, "x.shape=[0,3,7,9] y.shape=[0,3,4,5] argmax.shape=[0,3,4,5]", NULL},
    {"maxpool2d", B, "x.shape=[2,0,7,9] dx.shape=[2,0,7,9] dy.shape=[2,0,4,5] argmax.shape=[2,0,4,5]", NULL},
    {"linear", F, "a.shape=[0,7] y.shape=[0,9] pre.shape=[0,9] residual.shape=[0,9]", NULL},
    {"linear", B, "a.shape=[0,7] dy.shape=[0,9] pre.shape=[0,9] da.shape=[0,7] dresidual.shape=[0,9]", "db"},
    {"linear", B, "a.shape=[0,7] dy.shape=[0,9] pre.shape=[0,9] da.shape=[0,7] dresidual.shape=[0,9]", "dbias"},
    {"sum_squares", F, "x.shape=[0,65] x.data=NULL", "y"},
    {"adamw", F,
     "w_out.shape=[0] m_out.shape=[0] v_out.shape=[0] w.shape=[0] m.shape=[0] v.shape=[0] g.shape=[0] g.data=NULL",
     NULL},
    {"sgd", F, "w_out.shape=[0] momentum_out.shape=[0] w.shape=[0] momentum.shape=[0] g.shape=[0] w.data=NULL", NULL},
    {"linear", B,
     "b.shape=[7,0] db.shape=[7,0] dy.shape=[2,5,0] pre.shape=[2,5,0] bias.shape=[0] dbias.shape=[0] "
     "dresidual.shape=[2,5,0]",
     "da"},
    {"cross_entropy", F, "logits.shape=[0,65] target.shape=[0] lse.shape=[0] logits.data=NULL target.data=NULL",
     "loss"},
    {"cross_entropy", F, "logits.shape=[2,0,65] target.shape=[2,0] lse=absent @reduction=sum", "loss"},
    {"cross_entropy", B, "logits.shape=[0,65] target.shape=[0] lse.shape=[0] dlogits.shape=[0,65]", NULL},
    {"cross_entropy", B, "target[0]=7 target[1]=7 target[2]=7 target[3]=7 target[4]=7 target[5]=7 @ignore_index=7",
     "dlogits"},
    {"linear_cross_entropy", F, "x.shape=[0,17] target.shape=[0] lse.shape=[0] x.data=NULL target.data=NULL", "loss"},
    {"linear_cross_entropy", B, "x.shape=[0,17] dx.shape=[0,17] target.shape=[0] lse.shape=[0] loss=absent", "dweight"},
    {"swiglu", F, "gate.shape=[0,65] up.shape=[0,65] y.shape=[0,65] gate.data=NULL up.data=NULL", NULL},
    {"swiglu", B, "gate.shape=[0] up.shape=[0] dy.shape=[0] dgate.shape=[0] dup.shape=[0]", NULL},
    {"conv2d", F, "x.shape=[0,4,7,9] y.shape=[0,6,4,5]", NULL},
    {"conv2d", B, "x.shape=[0,4,7,9] dx.shape=[0,4,7,9] dy.shape=[0,6,4,5]", "dweight"},
    {"conv2d", B, "x.shape=[0,4,7,9] dx.shape=[0,4,7,9] dy.shape=[0,6,4,5]", "dbias"},
    {"conv2d", B, "weight.shape=[0,2,3,3] dweight.shape=[0,2,3,3] dbias.shape=[0] dy.shape=[2,0,4,5]", "dx"},
    {"add", F, "a.shape=[0,3,65] y.shape=[0,3,65]", NULL},
    {"add", B, "da.shape=[0,3,65] dy.shape=[0,3,65]", "db"},
    {"mul", F, "a.shape=[0,3,65] y.shape=[0,3,65] a.data=NULL", NULL},
    {"mul", B, "da.shape=[0,3,65] dy.shape=[0,3,65] a.shape=[0,3,65]", "db"},
    {"scale", F, "x.shape=[0,65] y.shape=[0,65] x.data=NULL y.data=NULL", NULL},
    {"mean", F, "x.shape=[0,17,3] y.shape=[0,3]", NULL},
    {"mean", B, "x.shape=[2,17,0] dx.shape=[2,17,0] dy.shape=[2,0]", NULL},
    {"dropout", F, "x.shape=[0,65] y.shape=[0,65]", NULL},
    {"cast", F, "x.shape=[0,65] y.shape=[0,65]", NULL},
    {"attention", F, "q.shape=[0,5,4,3] k.shape=[0,7,2,3] v.shape=[0,7,2,3] y.shape=[0,5,4,3] lse.shape=[0,4,5]", NULL},
    {"attention", F, "q.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]", NULL},
    {"attention", F, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3]", "y"},
    {"attention", B, "q.shape=[2,0,4,3] dq.shape=[2,0,4,3] dy.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]",
     "dk"},
    {"attention", B, "q.shape=[2,0,4,3] dq.shape=[2,0,4,3] dy.shape=[2,0,4,3] y.shape=[2,0,4,3] lse.shape=[2,4,0]",
     "dv"},
    {"attention", B, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3] dk.shape=[2,0,2,3] dv.shape=[2,0,2,3]", "dq"},
    {"attention", B, "@causal=0 k.shape=[2,0,2,3] v.shape=[2,0,2,3] dk.shape=[2,0,2,3] dv.shape=[2,0,2,3] y=absent",
     "dq"},
};

enum { EMPTIES = sizeof empties / sizeof empties[0] };

static const char *try_empty(vjp_device *device, const nothing *row, bool accumulate) {
    static char text[1024];
    call made;
    sample_types types = {VJP_F32, VJP_F32, VJP_I32};
    const char *wrong = NULL;
    if (!call_make(&made, device, sample_find(row->op), row->pass, types, 7)) return "no sample";
    if (!edit_call(&made, row->edit)) return "the edit makes no sense";
    int slot = row->zero ? call_slot(&made, row->zero) : -1;
    if (accumulate && slot >= 0) made.tensor[slot].flags = VJP_ACCUMULATE;
    unsigned char *expected = malloc(made.block_bytes);
    memcpy(expected, made.block, made.block_bytes);
    /* Other outputs that are not empty are not checked here. */
    for (size_t i = 0; i < made.info->pass[made.pass].outputs; i++)
        if ((int)i != slot && call_bytes(&made.tensor[i])) made.pointer[i] = NULL;
    if (slot >= 0 && !accumulate)
        memset(expected + ((unsigned char *)made.tensor[slot].data - made.block), 0, call_bytes(&made.tensor[slot]));
    vjp_status status = call_run(device, &made);
    if (status != VJP_OK) {
        snprintf(text, sizeof text, "%s: %s", vjp_status_name(status), vjp_error(device));
        wrong = text;
    } else if (memcmp(expected, made.block, made.block_bytes) != 0) {
        wrong = accumulate ? "something was changed" : "not zero, or something else was changed";
    }
    free(expected);
    call_free(&made);
    return wrong;
}

static void empty_is_fine(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    int failed = 0;
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        for (int i = 0; i < EMPTIES; i++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                const char *wrong = try_empty(device, &empties[i], accumulate);
                if (!wrong) continue;
                failed++;
                print_error("%s %s.%s %s%s\n    %s\n", names[d], empties[i].op,
                            empties[i].pass == VJP_FORWARD ? "forward" : "backward", empties[i].edit,
                            accumulate ? " (accumulating)" : "", wrong);
            }
        vjp_close(device);
    }
    assert_int_equal(failed, 0);
}

/* An inner product over nothing is zero, so y is the activation of the bias. */
static void no_inner_dimension(void **state) {
    (void)state;
    static const char *const names[] = {"cpu", "ref"};
    for (int d = 0; d < 2; d++) {
        vjp_device *device = open_device(names[d]);
        float y[6] = {9, 9, 9, 9, 9, 9}, bias[3] = {1, -2, 3};
        vjp_tensor ty = vjp_tensor_of(y, VJP_F32, 2, (int64_t[]){2, 3}),
                   tb = vjp_tensor_of(bias, VJP_F32, 1, (int64_t[]){3});
        vjp_tensor a = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){2, 0}),
                   b = vjp_tensor_of(NULL, VJP_F32, 2, (int64_t[]){0, 3});
        assert_int_equal(vjp_linear_forward(device, &ty, NULL, &a, &b, &tb, NULL, NULL,
                                            WITH(linear, .activation = VJP_ACTIVATION_RELU, .transpose_b = 0)),
                         VJP_OK);
        const float expected[6] = {1, 0, 3, 1, 0, 3};
        assert_memory_equal(y, expected, sizeof y);
        vjp_close(device);
    }
}

static void refused(const vjp_device *device, const char *why, vjp_status status) {
    assert_int_equal(status, VJP_INVALID);
    if (!strstr(vjp_error(device), why)) fail_msg("%s", vjp_error(device));
}

/* linear's gate is in no sample, because it excludes an activation and a residual. */
static void gates_of_linear(void **state) {
    (void)state;
    enum { A, B_, Y, PRE, OTHER, GATE, TENSORS, DOWN = 2, SIDE = 3 };
    vjp_device *device = open_device("cpu");
    float data[TENSORS][SIDE * SIDE] = {{0}};
    vjp_tensor t[TENSORS];
    for (int i = 0; i < TENSORS; i++)
        t[i] = vjp_tensor_of(data[i], VJP_F32, 2, (int64_t[]){i == B_ ? SIDE : DOWN, SIDE});
    vjp_tensor narrow = t[GATE], narrow_a = t[A], narrow_b = t[B_], narrow_y = t[Y];
    narrow.dtype = narrow_a.dtype = narrow_b.dtype = narrow_y.dtype = VJP_BF16;
    vjp_tensor flat = vjp_tensor_of(data[GATE], VJP_F32, 1, (int64_t[]){DOWN * SIDE});
    refused(device, "gate and activation are both given",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, NULL, &t[GATE],
                               WITH(linear, .activation = VJP_ACTIVATION_RELU)));
    refused(device, "gate and residual are both given",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, &t[OTHER], &t[GATE], NULL));
    refused(device, "pre is f32 and gate is bf16",
            vjp_linear_forward(device, &narrow_y, &t[PRE], &narrow_a, &narrow_b, NULL, NULL, &narrow, NULL));
    refused(device, "gate has shape [6]; expected [2, 3]",
            vjp_linear_forward(device, &t[Y], NULL, &t[A], &t[B_], NULL, NULL, &flat, NULL));
    refused(device, "gate and dresidual are both given",
            vjp_linear_backward(device, &t[A], NULL, NULL, &t[OTHER], NULL, &t[Y], NULL, &t[B_], NULL, NULL, &t[GATE],
                                NULL));
    refused(
        device, "gate is missing: dgate needs it",
        vjp_linear_backward(device, NULL, NULL, NULL, NULL, &t[OTHER], &t[Y], &t[A], &t[B_], NULL, NULL, NULL, NULL));
    refused(device, "a and pre are both missing: dgate needs one",
            vjp_linear_backward(device, NULL, NULL, NULL, NULL, &t[OTHER], &t[Y], NULL, &t[B_], NULL, NULL, &t[GATE],
                                NULL));
    vjp_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cpu_refuses),         cmocka_unit_test(ref_refuses),
        cmocka_unit_test(every_pass_has_rows), cmocka_unit_test(cpu_has_no_f64),
        cmocka_unit_test(misuse_of_call),      cmocka_unit_test(workspace_overlap),
        cmocka_unit_test(empty_is_fine),       cmocka_unit_test(no_inner_dimension),
        cmocka_unit_test(gates_of_linear),     cmocka_unit_test(last_row_in_workspace),
        cmocka_unit_test(first_bad_index),     cmocka_unit_test(cpu_casts_to_no_f64),
    };
    return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
