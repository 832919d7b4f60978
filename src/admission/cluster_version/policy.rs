//! The values of `spec.upgradePolicy`.

use serde_json::{Map, Value};

use super::rules::unknown_keys;
use crate::{api::FieldError, args::go};

const PATH: &str = "spec.upgradePolicy";
const KEYS: [&str; 10] = [
    "maxConcurrent",
    "canary",
    "soak",
    "maxFailures",
    "stepTimeout",
    "paused",
    "windows",
    "surge",
    "rollback",
    "certificates",
];

/// Checks a policy. That this version does not act on one yet is told, too: whoever sets it relies on it.
pub(super) fn check(policy: &Value, faults: &mut Vec<FieldError>, warnings: &mut Vec<String>) {
    let Value::Object(map) = policy else {
        faults.push(FieldError::invalid(PATH, policy, "must be an object"));
        return;
    };
    if map.keys().any(|key| key != "certificates") {
        warnings.push(format!("{PATH}: only certificates has an effect in this version"));
    }
    unknown_keys(PATH, map, &KEYS, warnings);
    let mut fields = Fields {
        path: PATH.to_owned(),
        map,
        faults,
    };
    fields.is(
        "maxConcurrent",
        is_amount,
        "must be a number from 1, or a percentage from \"1%\" to \"100%\"",
    );
    fields.is(
        "maxFailures",
        |value| at_least(value, 1),
        "must be a number from 1",
    );
    for key in ["soak", "stepTimeout"] {
        fields.is(key, is_duration, "must be a duration such as \"30s\" or \"10m\"");
    }
    fields.is("paused", Value::is_boolean, "must be true or false");
    fields.one_of("surge", &["IfPossible", "Never"]);
    fields.one_of("rollback", &["Automatic", "Manual"]);
    fields.one_of("certificates", &["Always", "IfNeeded"]);
    fields.below("canary", |canary| {
        canary.is("count", |value| at_least(value, 0), "must be a number from 0");
        canary.is("selector", Value::is_object, "must be a label selector");
    });
    if let Some(Value::Object(canary)) = map.get("canary") {
        unknown_keys(
            &format!("{PATH}.canary"),
            canary,
            &["count", "selector"],
            warnings,
        );
    }
    windows(map, faults, warnings);
}

fn windows(policy: &Map<String, Value>, faults: &mut Vec<FieldError>, warnings: &mut Vec<String>) {
    let windows = policy.get("windows").unwrap_or(&Value::Null);
    let Value::Array(windows) = windows else {
        if !windows.is_null() {
            faults.push(FieldError::invalid(
                format!("{PATH}.windows"),
                windows,
                "must be a list",
            ));
        }
        return;
    };
    for (index, window) in windows.iter().enumerate() {
        let path = format!("{PATH}.windows[{index}]");
        let Value::Object(map) = window else {
            faults.push(FieldError::invalid(path, window, "must be an object"));
            continue;
        };
        for (key, what) in [
            ("schedule", "when the window opens, as five fields of cron"),
            ("duration", "how long it is open"),
        ] {
            if map.get(key).is_none_or(Value::is_null) {
                faults.push(FieldError::required(format!("{path}.{key}"), what));
            }
        }
        unknown_keys(&path, map, &["schedule", "duration", "timeZone"], warnings);
        let mut fields = Fields { path, map, faults };
        fields.is(
            "schedule",
            is_cron,
            "must be five fields of cron such as \"0 2 * * 6\"",
        );
        fields.is("duration", is_duration, "must be a duration such as \"4h\"");
        fields.is(
            "timeZone",
            is_time_zone,
            "must be a time zone such as \"Europe/Berlin\" or \"UTC\"",
        );
    }
}

/// The fields of one object.
struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
    faults: &'a mut Vec<FieldError>,
}

impl Fields<'_> {
    /// A field, when it is there, has to be so.
    fn is(&mut self, key: &str, right: impl Fn(&Value) -> bool, what: &str) {
        if let Some(value) = self.map.get(key)
            && !value.is_null()
            && !right(value)
        {
            self.faults
                .push(FieldError::invalid(format!("{}.{key}", self.path), value, what));
        }
    }

    /// A field, when it is there, has to be one of these.
    fn one_of(&mut self, key: &str, supported: &[&str]) {
        if let Some(value) = self.map.get(key)
            && !value.is_null()
            && !supported.iter().any(|supported| value == supported)
        {
            self.faults.push(FieldError::not_supported(
                format!("{}.{key}", self.path),
                value,
                supported,
            ));
        }
    }

    /// Looks at the fields of the object at `key`, when it is there.
    fn below(&mut self, key: &str, look: impl Fn(&mut Fields<'_>)) {
        self.is(key, Value::is_object, "must be an object");
        if let Some(Value::Object(map)) = self.map.get(key) {
            look(&mut Fields {
                path: format!("{}.{key}", self.path),
                map,
                faults: self.faults,
            });
        }
    }
}

fn at_least(value: &Value, least: u64) -> bool {
    value
        .as_u64()
        .is_some_and(|number| (least..=u64::from(u32::MAX)).contains(&number))
}

fn is_amount(value: &Value) -> bool {
    let percent = value.as_str().and_then(|text| text.strip_suffix('%'));
    at_least(value, 1)
        || percent
            .and_then(|digits| digits.parse::<u8>().ok())
            .is_some_and(|percent| (1..=100).contains(&percent))
}

fn is_duration(value: &Value) -> bool {
    value
        .as_str()
        .is_some_and(|text| go::parse_duration(text).is_ok_and(|duration| !duration.is_zero()))
}

/// Five fields of cron: minute, hour, day of the month, month, day of the week.
fn is_cron(value: &Value) -> bool {
    const MONTHS: [&str; 12] = [
        "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
    ];
    const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
    const FIELDS: [(u8, u8, &[&str]); 5] = [
        (0, 59, &[]),
        (0, 23, &[]),
        (1, 31, &[]),
        (1, 12, &MONTHS),
        (0, 7, &DAYS),
    ];
    let Some(text) = value.as_str() else { return false };
    let fields: Vec<_> = text.split_ascii_whitespace().collect();
    fields.len() == FIELDS.len()
        && fields.iter().zip(FIELDS).all(|(field, (from, to, names))| {
            let number = |text: &str| {
                let is_name = names.iter().any(|name| name.eq_ignore_ascii_case(text));
                is_name || text.parse().is_ok_and(|number| (from..=to).contains(&number))
            };
            field.split(',').all(|item| {
                let (range, step) = item
                    .split_once('/')
                    .map_or((item, None), |(range, step)| (range, Some(step)));
                let is_step = step.is_none_or(|step| step.parse::<u8>().is_ok_and(|step| step > 0));
                is_step
                    && (range == "*"
                        || range
                            .split_once('-')
                            .map_or_else(|| number(range), |(from, to)| number(from) && number(to)))
            })
        })
}

/// The form of a name of the IANA database. Whether there is such a zone is known where a database is.
fn is_time_zone(value: &Value) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'+'))
    };
    value.as_str().is_some_and(|text| text.split('/').all(is_part))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(policy: &Value) -> (Vec<String>, Vec<String>) {
        let (mut faults, mut warnings) = (Vec::new(), Vec::new());
        check(policy, &mut faults, &mut warnings);
        (faults.iter().map(ToString::to_string).collect(), warnings)
    }

    #[test]
    fn a_good_policy_is_told_to_be_idle() {
        let policy = json!({
            "maxConcurrent": "25%", "canary": {"count": 0, "selector": {"matchLabels": {}}}, "soak": "30s", "maxFailures": 1,
            "stepTimeout": "10m", "paused": false, "surge": "IfPossible", "rollback": "Manual", "certificates": "IfNeeded",
            "windows": [{"schedule": "0 2 * * sat", "timeZone": "America/Argentina/Ushuaia", "duration": "4h"}],
        });
        assert_eq!(
            told(&policy),
            (
                vec![],
                vec!["spec.upgradePolicy: only certificates has an effect in this version".into()]
            )
        );
        let nothing = json!({"maxConcurrent": null, "windows": null, "canary": null});
        assert!(told(&nothing).0.is_empty());
    }

    #[test]
    fn each_value_is_looked_at() {
        for (policy, fault) in [
            (
                json!([]),
                "spec.upgradePolicy: Invalid value: []: must be an object",
            ),
            (
                json!({"maxConcurrent": 0}),
                "spec.upgradePolicy.maxConcurrent: Invalid value: 0: must be a number from 1, or a percentage from \"1%\" to \"100%\"",
            ),
            (
                json!({"maxConcurrent": "101%"}),
                "spec.upgradePolicy.maxConcurrent: Invalid value: \"101%\": must be a number from 1, or a percentage from \"1%\" to \"100%\"",
            ),
            (
                json!({"maxFailures": 0}),
                "spec.upgradePolicy.maxFailures: Invalid value: 0: must be a number from 1",
            ),
            (
                json!({"soak": "0s"}),
                "spec.upgradePolicy.soak: Invalid value: \"0s\": must be a duration such as \"30s\" or \"10m\"",
            ),
            (
                json!({"stepTimeout": 600}),
                "spec.upgradePolicy.stepTimeout: Invalid value: 600: must be a duration such as \"30s\" or \"10m\"",
            ),
            (
                json!({"paused": "yes"}),
                "spec.upgradePolicy.paused: Invalid value: \"yes\": must be true or false",
            ),
            (
                json!({"surge": "Always"}),
                "spec.upgradePolicy.surge: Unsupported value: \"Always\": supported values: \"IfPossible\", \"Never\"",
            ),
            (
                json!({"canary": 1}),
                "spec.upgradePolicy.canary: Invalid value: 1: must be an object",
            ),
            (
                json!({"canary": {"count": -1}}),
                "spec.upgradePolicy.canary.count: Invalid value: -1: must be a number from 0",
            ),
            (
                json!({"windows": {}}),
                "spec.upgradePolicy.windows: Invalid value: {}: must be a list",
            ),
            (
                json!({"windows": [1]}),
                "spec.upgradePolicy.windows[0]: Invalid value: 1: must be an object",
            ),
            (
                json!({"windows": [{"schedule": "0 2 * * 6"}]}),
                "spec.upgradePolicy.windows[0].duration: Required value: how long it is open",
            ),
            (
                json!({"windows": [{"schedule": "@daily", "duration": "1h"}]}),
                "spec.upgradePolicy.windows[0].schedule: Invalid value: \"@daily\": must be five fields of cron such as \"0 2 * * 6\"",
            ),
            (
                json!({"windows": [{"schedule": "0 2 * * 6", "duration": "1h", "timeZone": "Europe Berlin"}]}),
                "spec.upgradePolicy.windows[0].timeZone: Invalid value: \"Europe Berlin\": must be a time zone such as \"Europe/Berlin\" or \"UTC\"",
            ),
        ] {
            assert_eq!(told(&policy).0, [fault]);
        }
        for (policy, meant) in [
            (json!({"maxconcurrent": 1}), "maxConcurrent"),
            (json!({"canary": {"Count": 1}}), "count"),
            (
                json!({"windows": [{"schedule": "* * * * *", "duration": "1h", "timezone": "UTC"}]}),
                "timeZone",
            ),
        ] {
            let warning = told(&policy).1.remove(1);
            assert!(
                warning.ends_with(&format!("did you mean {meant:?}?")),
                "{warning}"
            );
        }
    }

    #[test]
    fn schedules() {
        for good in [
            "* * * * *",
            "0 2 * * 6",
            "*/15 0-6,22-23 1,15 jan-MAR Sun",
            "59 23 31 12 7",
        ] {
            assert!(is_cron(&good.into()), "{good}");
        }
        for bad in [
            "",
            "* * * *",
            "* * * * * *",
            "60 * * * *",
            "99 99 99 99 99",
            "a b c d e",
            "*/0 * * * *",
            "0 0 0 * *",
            "1- * * * *",
            "mon * * * *",
        ] {
            assert!(!is_cron(&bad.into()), "{bad}");
        }
    }
}
