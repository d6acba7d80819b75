//! Quotes words of command lines.

/// The word as a POSIX shell reads it back.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_are_quoted_where_a_shell_would_change_them() {
        for (word, expected) in [
            ("--set", "--set"),
            ("run.seed=1", "run.seed=1"),
            ("params.frozen=[\"h.*\"]", "'params.frozen=[\"h.*\"]'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
            ("a b", "'a b'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
