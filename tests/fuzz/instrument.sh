#!/bin/sh
# rustc, as RUSTC_WORKSPACE_WRAPPER calls it: Frit's libraries count which of their branches run, so that the fuzzer
# sees which inputs lead somewhere new. Programs, build scripts and tests are compiled as they are.
case " $* " in
*" --crate-type lib "*)
    exec "$@" -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=3 \
        -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C codegen-units=16 ;;
*) exec "$@" ;;
esac
