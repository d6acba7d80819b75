//! Tests that cross crates, in one binary so that LLVM is linked once.
