# SPDX-License-Identifier: MIT
# What WebGPU and Metal share: how ops become launches, and shaders as text in the library.
file(GLOB VJP_GPU_FILES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/*.c ${PROJECT_SOURCE_DIR}/src/gpu/ops/*.c)

# vjp_embed(KIND FILE...): the shaders of backend KIND as <build>/KIND_shaders.c, which has KIND_shader(name).
function(vjp_embed kind)
  # A shader may include files beside it.
  file(GLOB all CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/shaders/*)
  set(out ${CMAKE_BINARY_DIR}/${kind}_shaders.c)
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -D OUT=${out} -D "FILES=${ARGN}" -D HEADER=gpu/${kind}/device.h -D FUNCTION=${kind}_shader
            -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${all} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
endfunction()

# vjp_add_backend(KIND): libvjp-KIND from its own files, those above and its shaders. It has its own, hidden copies of
# what it needs of core and op. A module for browsers has it in itself.
function(vjp_add_backend kind)
  file(GLOB own_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/${kind}/*.c)
  add_library(vjp_${kind}_objects OBJECT ${own_files} ${VJP_GPU_FILES} ${CMAKE_BINARY_DIR}/${kind}_shaders.c)
  target_link_libraries(vjp_${kind}_objects PRIVATE vjp_flags)
  if(VJP_WEB)
    string(TOUPPER ${kind} upper)
    target_sources(vjp_static PRIVATE $<TARGET_OBJECTS:vjp_${kind}_objects>)
    set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/open.c APPEND PROPERTY COMPILE_DEFINITIONS VJP_BUILT_IN_${upper})
    return()
  endif()
  add_library(vjp-${kind} SHARED $<TARGET_OBJECTS:vjp_${kind}_objects>)
  target_link_libraries(vjp-${kind} PRIVATE vjp_static ${CMAKE_DL_LIBS} m)
  if(APPLE)
    target_link_options(vjp-${kind} PRIVATE -Wl,-exported_symbol,_vjp_backend_entry)
  else()
    # A sanitizer's functions are the program's: a library that uses them has them undefined.
    set(undefined -Wl,--no-undefined)
    if(VJP_SANITIZE)
      set(undefined -fsanitize=${VJP_SANITIZE})
    endif()
    target_link_options(vjp-${kind} PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed ${undefined})
  endif()
  set_target_properties(vjp-${kind} PROPERTIES INSTALL_RPATH "${VJP_ORIGIN}")
endfunction()
