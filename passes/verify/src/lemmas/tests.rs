//! Each lemma against the interpreter.
