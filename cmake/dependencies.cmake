# SPDX-License-Identifier: MIT
# Optional libraries. A missing one disables its part and says so; none is required.
add_library(vjp_dependencies INTERFACE)

# Matrix products: BLIS or OpenBLAS beside the built-in kernel. Debian and Ubuntu keep each variant's header in its own
# folder (blis-openmp, openblas-pthread, ...), others with the other headers; linking a small program shows whether
# header and library belong together. VJP_BLAS can exclude either.
set(CMAKE_TRY_COMPILE_TARGET_TYPE EXECUTABLE)
set(vjp_blas none)
if(VJP_BLAS MATCHES "^(auto|blis)$")
  find_path(BLIS_INCLUDE_DIR blis.h PATH_SUFFIXES blis blis-pthread blis-openmp blis-serial)
  find_library(BLIS_LIBRARY blis PATH_SUFFIXES blis-pthread blis-openmp blis-serial)
  if(BLIS_INCLUDE_DIR AND BLIS_LIBRARY)
    file(WRITE ${CMAKE_BINARY_DIR}/probe/blis.c "
#include <blis.h>
#include <stdio.h>
int main(void) {
    float x = 1, y = 0;
    rntm_t one;
    bli_rntm_init(&one);
    bli_rntm_set_num_threads(1, &one);
    bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, 1, 1, 1, &x, &x, 1, 1, &x, 1, 1, &y, &y, 1, 1, NULL, &one);
    puts(bli_info_get_version_str());
    return y != 1;
}
")
    if(CMAKE_CROSSCOMPILING)
      try_compile(BLIS_WORKS ${CMAKE_BINARY_DIR}/probe ${CMAKE_BINARY_DIR}/probe/blis.c
        CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${BLIS_INCLUDE_DIR}" LINK_LIBRARIES ${BLIS_LIBRARY} Threads::Threads m)
    else()
      try_run(BLIS_STATUS BLIS_LINKS ${CMAKE_BINARY_DIR}/probe ${CMAKE_BINARY_DIR}/probe/blis.c
        CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${BLIS_INCLUDE_DIR}" LINK_LIBRARIES ${BLIS_LIBRARY} Threads::Threads m
        RUN_OUTPUT_VARIABLE BLIS_OUTPUT)
      if(BLIS_LINKS AND BLIS_STATUS EQUAL 0)
        set(BLIS_WORKS TRUE)
      endif()
      if(BLIS_OUTPUT MATCHES "([0-9]+\\.[0-9]+(\\.[0-9]+)?)")
        set(VJP_BLIS_VERSION ${CMAKE_MATCH_1} CACHE INTERNAL "")
      endif()
    endif()
    if(BLIS_WORKS)
      set(vjp_blas blis)
    endif()
  endif()
endif()
if(VJP_BLAS MATCHES "^(auto|openblas)$" AND vjp_blas STREQUAL none)
  find_path(OPENBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas-pthread openblas-serial openblas-openmp openblas)
  find_library(OPENBLAS_LIBRARY openblas PATH_SUFFIXES openblas-pthread openblas-serial openblas-openmp)
  if(OPENBLAS_INCLUDE_DIR AND OPENBLAS_LIBRARY)
    file(WRITE ${CMAKE_BINARY_DIR}/probe/openblas.c "
#include <cblas.h>
extern char *openblas_get_config(void);
extern int openblas_get_parallel(void);
extern void openblas_set_num_threads(int threads);
int main(void) {
    float x = 1, y = 0;
    openblas_set_num_threads(1);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, x, &x, 1, &x, 1, 0, &y, 1);
    return y != 1 || !openblas_get_config() || openblas_get_parallel() < 0;
}
")
    try_compile(OPENBLAS_WORKS ${CMAKE_BINARY_DIR}/probe ${CMAKE_BINARY_DIR}/probe/openblas.c
      CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${OPENBLAS_INCLUDE_DIR}" LINK_LIBRARIES ${OPENBLAS_LIBRARY} Threads::Threads m)
    if(OPENBLAS_WORKS)
      set(vjp_blas openblas)
    endif()
  endif()
endif()
if(vjp_blas STREQUAL blis)
  target_compile_definitions(vjp_dependencies INTERFACE VJP_HAVE_BLIS)
  if(VJP_BLIS_VERSION)
    target_compile_definitions(vjp_dependencies INTERFACE VJP_BLIS_VERSION="${VJP_BLIS_VERSION}")
  endif()
  target_include_directories(vjp_dependencies SYSTEM INTERFACE ${BLIS_INCLUDE_DIR})
  target_link_libraries(vjp_dependencies INTERFACE ${BLIS_LIBRARY})
  message(STATUS "vjp: matrix products by the built-in kernel or BLIS ${VJP_BLIS_VERSION} (${BLIS_LIBRARY})")
elseif(vjp_blas STREQUAL openblas)
  target_compile_definitions(vjp_dependencies INTERFACE VJP_HAVE_OPENBLAS)
  target_include_directories(vjp_dependencies SYSTEM INTERFACE ${OPENBLAS_INCLUDE_DIR})
  target_link_libraries(vjp_dependencies INTERFACE ${OPENBLAS_LIBRARY})
  message(STATUS "vjp: matrix products by the built-in kernel or OpenBLAS (${OPENBLAS_LIBRARY})")
elseif(VJP_BLAS MATCHES "^(blis|openblas)$")
  message(FATAL_ERROR "vjp: VJP_BLAS=${VJP_BLAS}, but it was not found (Debian: lib${VJP_BLAS}-dev)")
else()
  message(STATUS "vjp: matrix products by the built-in kernel")
endif()

# Pictures to train on: JPEG by libjpeg-turbo, PNG by libpng, for the program alone. A small program that links tells
# whether what was found is for the processor that we compile for.
add_library(vjp_pictures INTERFACE)
function(vjp_add_decoder format library debian program)
  find_package(${format} QUIET)
  if(${format}_FOUND)
    file(WRITE ${CMAKE_BINARY_DIR}/probe/${format}.c "${program}")
    try_compile(${format}_WORKS ${CMAKE_BINARY_DIR}/probe ${CMAKE_BINARY_DIR}/probe/${format}.c
      LINK_LIBRARIES ${format}::${format})
  endif()
  if(${format}_FOUND AND ${format}_WORKS)
    target_compile_definitions(vjp_pictures INTERFACE VJP_HAVE_${format})
    target_link_libraries(vjp_pictures INTERFACE ${format}::${format})
    message(STATUS "vjp: ${format} pictures by ${library}")
  else()
    message(STATUS "vjp: no ${format} pictures: ${library} was not found (Debian: ${debian})")
  endif()
endfunction()
vjp_add_decoder(JPEG libjpeg-turbo libjpeg-dev "
#include <stdio.h>
#include <jpeglib.h>
int main(void) {
    struct jpeg_decompress_struct d;
    struct jpeg_error_mgr e;
    d.err = jpeg_std_error(&e);
    jpeg_create_decompress(&d);
    jpeg_mem_src(&d, (const unsigned char *)\"\", 0);
    return 0;
}
")
vjp_add_decoder(PNG libpng libpng-dev "
#include <png.h>
int main(void) {
    return !png_create_read_struct(PNG_LIBPNG_VER_STRING, NULL, NULL, NULL);
}
")

# Regular expressions of tokenizers, for the program alone: PCRE2, as pictures above.
add_library(vjp_patterns INTERFACE)
find_path(PCRE2_INCLUDE_DIR pcre2.h)
find_library(PCRE2_LIBRARY pcre2-8)
if(PCRE2_INCLUDE_DIR AND PCRE2_LIBRARY)
  file(WRITE ${CMAKE_BINARY_DIR}/probe/pcre2.c "
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
int main(void) {
    int code;
    PCRE2_SIZE at;
    return !pcre2_compile((PCRE2_SPTR)\"\\\\p{White_Space}\", PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
}
")
  try_compile(PCRE2_WORKS ${CMAKE_BINARY_DIR}/probe ${CMAKE_BINARY_DIR}/probe/pcre2.c
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${PCRE2_INCLUDE_DIR}" LINK_LIBRARIES ${PCRE2_LIBRARY})
endif()
if(PCRE2_WORKS)
  target_compile_definitions(vjp_patterns INTERFACE VJP_HAVE_PCRE2)
  target_include_directories(vjp_patterns SYSTEM INTERFACE ${PCRE2_INCLUDE_DIR})
  target_link_libraries(vjp_patterns INTERFACE ${PCRE2_LIBRARY})
  message(STATUS "vjp: regular expressions of tokenizers by PCRE2 (${PCRE2_LIBRARY})")
else()
  message(STATUS "vjp: no regular expressions of tokenizers: PCRE2 was not found (Debian: libpcre2-dev)")
endif()
