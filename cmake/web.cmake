# SPDX-License-Identifier: MIT
# The module for browsers (web/README.md), compiled by zig for wasm32-wasi in place of the program. VJP_WEB names the
# variant, of which scripts/web builds all:
#
#   relaxed-threads, relaxed   the set wasm: relaxed SIMD, whose multiply-add browsers fuse, so the bits of all other sets
#   simd-threads, simd         the set plain: without a fused multiply-add
set(VJP_WEB_FLAGS -O2 CACHE STRING "Compiler flags of the module")
set(CMAKE_C_FLAGS_RELEASE "${VJP_WEB_FLAGS} -DNDEBUG")
set(CMAKE_POSITION_INDEPENDENT_CODE OFF)
set(vjp_web_features "generic+simd128+bulk_memory+nontrapping_fptoint+sign_ext")
if(VJP_WEB MATCHES relaxed)
  string(APPEND vjp_web_features "+relaxed_simd")
endif()
# One memory, made by the page, for all workers; each has a stack and thread-local variables of its own.
set(vjp_web_links "")
if(VJP_WEB MATCHES threads)
  string(APPEND vjp_web_features "+atomics")
  set(vjp_web_links -Wl,--shared-memory,--export=__stack_pointer,--export=__wasm_init_tls,--export=__tls_size)
endif()
target_compile_options(vjp_flags INTERFACE -mcpu=${vjp_web_features})

# Functions of the C library and of vjp that web/vjp.js calls as they are.
set(vjp_web_exports malloc free vjp_alloc vjp_free
  vjp_close vjp_device_summary vjp_graph_create vjp_graph_destroy vjp_graph_error vjp_graph_input vjp_graph_parameter
  vjp_graph_output vjp_graph_grad vjp_graph_name vjp_graph_text vjp_string_free
  vjp_program_destroy vjp_program_write vjp_program_read vjp_program_run)
list(TRANSFORM vjp_web_exports PREPEND "-Wl,--export=")

# vjp_add_module(NAME FILE...): NAME.wasm, without a main().
function(vjp_add_module name)
  add_executable(${name} $<TARGET_OBJECTS:vjp_module> ${ARGN})
  target_link_libraries(${name} PRIVATE vjp_tool)
  target_link_options(${name} PRIVATE -mexec-model=reactor -mcpu=${vjp_web_features} -s
    -Wl,--import-memory,--max-memory=2147483648 -Wl,-z,stack-size=2097152 ${vjp_web_exports} ${vjp_web_links})
endfunction()
