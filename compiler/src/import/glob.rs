//! Patterns over dotted names: `*` is any text without a dot, `**` any text, `?` one character.

/// Whether the pattern covers the whole name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    // row[j]: whether the pattern read so far covers the first j characters of the name.
    let mut row = vec![false; name.len() + 1];
    row[0] = true;
    let mut i = 0;
    while i < pattern.len() {
        let mut next = vec![false; name.len() + 1];
        let stars = pattern[i..].iter().take_while(|c| **c == '*').count();
        if stars > 0 {
            for j in 0..=name.len() {
                next[j] = row[j] || (j > 0 && next[j - 1] && (stars > 1 || name[j - 1] != '.'));
            }
            i += stars;
        } else {
            for j in 1..=name.len() {
                next[j] = row[j - 1] && (pattern[i] == '?' || pattern[i] == name[j - 1]);
            }
            i += 1;
        }
        row = next;
    }
    row[name.len()]
}

/// Whether any of the patterns covers the name.
pub fn any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|p| matches(p, name))
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stop_at_dots_unless_doubled() {
        for (pattern, name, expected) in [
            ("**", "h.0.attn.weight", true),
            ("*.bias", "fc.bias", true),
            ("*.bias", "h.fc.bias", false),
            ("**.bias", "h.fc.bias", true),
            ("h.*.ln_?.weight", "h.11.ln_1.weight", true),
            ("h.*.ln_?.weight", "h.11.mlp.ln_1.weight", false),
            ("fc", "fc1", false),
            ("", "", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} on {name}");
        }
    }
}
