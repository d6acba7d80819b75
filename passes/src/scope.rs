//! Scope globs: `*` stands for one part of a dotted path, `**` for any number of parts.

/// Whether the scope matches the pattern.
pub(crate) fn matches(pattern: &str, scope: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let scope: Vec<&str> = scope.split('.').filter(|part| !part.is_empty()).collect();
    parts(&pattern, &scope)
}

fn parts(pattern: &[&str], scope: &[&str]) -> bool {
    match (pattern, scope) {
        ([], scope) => scope.is_empty(),
        (["**", rest @ ..], _) => (0..=scope.len()).any(|n| parts(rest, &scope[n..])),
        ([_, ..], []) => false,
        ([first, rest @ ..], [part, others @ ..]) => {
            part_matches(first, part) && parts(rest, others)
        }
    }
}

/// Within one part `*` stands for any characters.
fn part_matches(pattern: &str, part: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == part,
        Some((head, tail)) => part.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len())
                .filter(|&i| rest.is_char_boundary(i))
                .any(|i| part_matches(tail, &rest[i..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_parts() {
        assert!(matches("h.*.attn", "h.3.attn"));
        assert!(!matches("h.*.attn", "h.3.4.attn"));
        assert!(matches("**.attn", "transformer.h.3.attn"));
        assert!(matches("**", ""));
        assert!(matches("h.**", "h"));
        assert!(matches("ln_*", "ln_f"));
        assert!(!matches("ln_*", "lm_head"));
        assert!(!matches("h", "h.3"));
    }
}
