//! `report.html`: a study on one page, without scripts and without anything from elsewhere.

use std::fmt::Write;

use crate::study::{BatchRecord, GroupRecord, SIGNIFICANT, StudyReport};

const STYLE: &str = "
body { font: 15px/1.5 system-ui, sans-serif; color: #282828; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { font-weight: 600 } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem; text-align: right; white-space: nowrap } th { border-bottom: 1px solid #888 }
th:first-child, td:first-child { text-align: left } tr.dropped { color: #888 }
.strong { color: #c83c14; font-weight: 600 } .wide { overflow-x: auto } .warning { background: #fff3d6; padding: .3rem .7rem }
svg { max-width: 100% } text { font: 12px system-ui, sans-serif; fill: #282828 }
";

/// The page.
pub fn page(report: &StudyReport, config: &str) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail, here and below.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>gradprism study</title>\n<style>{STYLE}</style></head><body>\n<h1>gradprism study</h1>\n"
    );
    let policy = &report.policy;
    let _ = writeln!(
        page,
        "<p>{} trainable of {} parameters, {}, on {}; logits over {}.</p>",
        policy.trainable, policy.parameters, policy.dtype, policy.device, policy.choices
    );
    if report.partial {
        page.push_str("<p class=\"warning\">Interrupted: what was finished is here, and more was to come.</p>\n");
    }
    let step_warnings = report.steps.iter().flat_map(|step| &step.warnings);
    for warning in report.warnings.iter().chain(step_warnings) {
        let _ = writeln!(page, "<p class=\"warning\">{}</p>", escaped(warning));
    }
    for step in &report.steps {
        if report.steps.len() > 1 {
            let _ = writeln!(page, "<h2>Step {}</h2>", step.step);
        }
        page.push_str(&numbers(step));
        page.push_str(&scatter(step));
        page.push_str(&groups(step));
    }
    let _ =
        write!(page, "<h2>Configuration</h2>\n<pre>{}</pre>\n</body></html>\n", escaped(config));
    page
}

fn numbers(step: &BatchRecord) -> String {
    let mut rows = vec![
        (
            "groups, trajectories, sampled tokens",
            format!("{}, {}, {}", step.group_count, step.trajectories, step.tokens),
        ),
        ("mean reward", number(step.reward_mean)),
        ("groups of equal rewards", percent(step.all_equal_share)),
        ("groups with significant signal", percent(step.significant_share)),
        ("kept by the filter", percent(step.kept.share)),
        ("share of the signal in what is kept", step.kept.signal_share.map_or("–".into(), percent)),
        ("mean share of the regularizers", step.dominance_mean.map_or("–".into(), percent)),
        ("Spearman of reward variance and SNR", optional(step.spearman_rv_snr)),
        ("mean cosine between prompts: task", optional(step.task_coherence)),
        ("mean cosine between prompts: regularizers", optional(step.reg_coherence)),
        ("clip fraction", percent(step.ratio.clip_fraction)),
        ("approximate KL to the sampling policy", number(step.ratio.approx_kl)),
    ];
    if let (Some(norms), Some(signal)) = (&step.grad_norm, &step.signal) {
        rows.extend([
            ("batch: |task|, |reg|", format!("{}, {}", number(norms.task), number(norms.reg))),
            (
                "batch: signal², noise²",
                format!("{}, {}", number(signal.signal_sq), number(signal.noise_sq)),
            ),
            ("batch: SNR", number(signal.snr)),
            ("gradient noise scale, in prompts", optional(signal.gradient_noise_scale)),
        ]);
    }
    let mut table = String::from("<table>\n");
    for (name, value) in rows {
        let _ = writeln!(table, "<tr><td>{name}</td><td>{value}</td></tr>");
    }
    table.push_str("</table>\n");
    table
}

/// SNR by reward variance, as in TensorBoard, with the groups' names on hover.
fn scatter(step: &BatchRecord) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 320.0;
    const MARGIN: f64 = 48.0;
    let largest = |of: fn(&GroupRecord) -> f64| {
        step.groups.iter().map(of).filter(|value| value.is_finite()).fold(0.0, f64::max)
    };
    let above_zero = |value: f64| if value > 0.0 { value } else { 1.0 };
    let x_span = above_zero(largest(|group| group.reward_variance));
    let y_span = above_zero(largest(|group| group.split.snr));
    let (right, bottom) = (WIDTH - 16.0, HEIGHT - MARGIN);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" role=\"img\"><title>SNR by reward variance</title>\n<path d=\"M{MARGIN} 16V{bottom}H{right}\" fill=\"none\" stroke=\"#282828\"/>\n<text x=\"{right}\" y=\"{}\" text-anchor=\"end\">reward variance, up to {}</text>\n<text x=\"{}\" y=\"12\">SNR, up to {}; red: significant signal; filled: kept</text>\n",
        bottom + 20.0,
        number(x_span),
        MARGIN + 6.0,
        number(y_span),
    );
    for group in &step.groups {
        let color = if is_significant(group) { "#c83c14" } else { "#5a82b4" };
        let fill = if group.kept { color } else { "none" };
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4.5\" fill=\"{fill}\" stroke=\"{color}\" stroke-width=\"2\"><title>{}</title></circle>",
            MARGIN + group.reward_variance / x_span * (right - MARGIN),
            bottom - group.split.snr / y_span * (bottom - 16.0),
            escaped(&group.group_id),
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn groups(step: &BatchRecord) -> String {
    let mut table = String::from(
        "<div class=\"wide\"><table>\n<tr><th>group</th><th>G</th><th>reward</th><th>RV</th><th>|task|</th><th>signal²</th><th>p</th><th>noise²</th><th>SNR</th><th>|reg|</th><th>reg share</th><th>kept</th></tr>\n",
    );
    let mut order: Vec<&GroupRecord> = step.groups.iter().collect();
    order.sort_by(|a, b| b.split.snr.total_cmp(&a.split.snr));
    for group in order {
        let split = &group.split;
        let strong = |is: bool| if is { " class=\"strong\"" } else { "" };
        let _ = writeln!(
            table,
            "<tr{}><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td{}>{}</td><td>{}</td><td>{}</td><td>{}</td><td{}>{}</td><td>{}</td></tr>",
            if group.kept { "" } else { " class=\"dropped\"" },
            escaped(&group.group_id),
            group.group_size,
            number(group.reward_mean),
            number(group.reward_variance),
            number(split.task_norm),
            with_error(split.signal_sq, split.signal_sq_se),
            strong(is_significant(group)),
            optional(split.signal_p),
            with_error(split.noise_sq, split.noise_sq_se),
            with_error(split.snr, split.snr_se),
            number(split.reg_norm),
            strong(split.dominance > Some(0.5)),
            split.dominance.map_or("–".into(), percent),
            if group.kept { "yes" } else { "no" },
        );
    }
    table.push_str("</table></div>\n");
    table
}

fn is_significant(group: &GroupRecord) -> bool {
    group.split.signal_p.is_some_and(|p| p <= SIGNIFICANT)
}

/// A number with three significant digits, for people.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".into()
    } else if (0.001..1000.0).contains(&size) {
        let decimals = (2 - size.log10().floor() as i32).clamp(0, 5) as usize;
        format!("{value:.decimals$}")
    } else {
        format!("{value:.2e}")
    }
}

/// A number and its standard error, for people.
pub fn with_error(value: f64, error: Option<f64>) -> String {
    match error {
        Some(error) if error > 0.0 => format!("{} ± {}", number(value), number(error)),
        _ => number(value),
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or("–".into(), number)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
