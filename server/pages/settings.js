// Fields for the settings of a workflow, from the schema that it tells; those that are left empty are not sent.
import { made, parsed } from "./asking.js";

const kindOf = (schema) => schema.type || ((schema.anyOf || []).some((one) => one.type === "string") ? "string" : "");
const listed = (schema) => kindOf(schema) === "array" && (schema.items || {}).type === "string";

function field(path, schema) {
  const kind = kindOf(schema), usual = schema.default;
  const given = { id: "set-" + path, name: path };
  if (schema.enum || kind === "boolean") {
    const choices = schema.enum || [true, false];
    return made("select", given, new Option(usual === undefined ? "" : `as usual (${usual})`, ""),
      ...choices.map((one) => new Option(String(one), JSON.stringify(one))));
  }
  if (kind === "integer" || kind === "number") {
    const input = made("input", { ...given, type: "number", step: kind === "integer" ? "1" : "any", placeholder: usual ?? "" });
    if (schema.minimum !== undefined) input.min = schema.minimum;
    if (schema.maximum !== undefined) input.max = schema.maximum;
    return input;
  }
  const text = usual === undefined || usual === null ? "" : listed(schema) ? usual.join("\n") : kind === "string" && typeof usual === "string" ? usual : JSON.stringify(usual);
  return made("textarea", { ...given, rows: 2, placeholder: text });
}

function read(element, path, schema) {
  const text = element.value, kind = kindOf(schema);
  if (!element.validity.valid) {  // told here: a browser tells nothing of a field that is folded away
    element.closest("details").open = true;
    element.focus();
    throw new Error(`${path}: ${element.validationMessage}`);
  }
  if (element.tagName === "SELECT") return JSON.parse(text);
  if (kind === "integer" || kind === "number") return Number(text);
  if (listed(schema)) return text.split("\n").filter((line) => line);
  return kind === "string" ? text : parsed(text, path + " is");
}

// Puts the fields into `where`; what it returns reads them, as `{"component.setting": value}`.
export function settingsForm(where, schema) {
  const fields = [];
  const groups = Object.entries((schema || {}).properties || {}).map(([component, about]) => {
    const group = made("fieldset", {}, made("legend", { textContent: component }));
    for (const [name, one] of Object.entries(about.properties || {})) {
      const path = `${component}.${name}`, element = field(path, one);
      const label = made("label", { htmlFor: element.id }, name, made("small", { textContent: one.description ? " " + one.description : "" }));
      group.append(label, element);
      fields.push([path, one, element]);
    }
    return group;
  });
  where.replaceChildren(...groups);
  return () => Object.fromEntries(
    fields.filter(([, , e]) => e.value.trim() || e.validity.badInput).map(([path, one, e]) => [path, read(e, path, one)]),
  );
}
