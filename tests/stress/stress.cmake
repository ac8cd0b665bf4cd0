# SPDX-License-Identifier: MIT
# What the parts of tests/stress run. The library that makes calls fail intercepts functions of glibc and system calls of
# Linux, on the processors that it has code for; a sanitizer intercepts the same functions.
include(CheckSymbolExists)
check_symbol_exists(__GLIBC__ features.h VJP_HAVE_GLIBC)
if(VJP_HAVE_GLIBC AND CMAKE_SYSTEM_NAME STREQUAL Linux AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$" AND NOT VJP_SANITIZE)
  add_library(faults MODULE stress/faults.c)
  target_link_libraries(faults PRIVATE vjp_flags ${CMAKE_DL_LIBS})
  set_target_properties(faults PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
  add_executable(faults_program stress/faults_program.c)
  target_link_libraries(faults_program PRIVATE vjp_tool)
endif()

add_executable(stress_pools stress/pools.c)
target_include_directories(stress_pools PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(stress_pools PRIVATE vjp_sample Threads::Threads)
